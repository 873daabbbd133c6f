"""Filter of system calls for the program in a sandbox.

The filter lists refused calls: those that change mounts, namespaces, identities or the machine, that reach into other
processes, that use up resources of all programs of a user (inotify, asynchronous I/O, huge pages, larger pipe and
socket buffers, leases), and that are large and seldom audited parts of the kernel (bpf, io_uring, userfaultfd,
keyrings, System V memory). Limits, priorities and processors of a process are its own to change, and nobody else's:
where one user is all there is, the first process of the sandbox has the same one as the program, and nothing but this
filter stands between them. Sockets exist within the sandbox only (AF_UNIX). Calls newer than the list do not exist.

Without a control group, memory is measured process by process, so memory of no process is refused as well:
anonymous shared memory, which outlives its mapping, and epoll, whose entries cannot be counted.

A filter is an array of classic BPF instructions over struct seccomp_data {nr, arch, instruction pointer, arguments};
see the kernel's documentation, userspace-api/seccomp_filter. Numbers: asm/unistd_64.h for x86-64, asm-generic/unistd.h
for aarch64.
"""

from __future__ import annotations

import errno
import struct

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _AND, _JUMP_EQUAL, _JUMP_ABOVE_OR_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT = 0, 4
_ARGUMENTS_AT = (16, 24, 32, 40)
"""Low halves of the first four arguments. Those that are tested are 32 bits wide, or flags of the low half."""
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

_LAST_KNOWN = 462
"""mseal, of Linux 6.10, on both machines."""
_NEW_NAMESPACE_FLAGS = 0x7E020000
_AF_UNIX = 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

REFUSED: dict[str, tuple[int | None, int | None]] = {
    # name: (x86-64, aarch64)
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "statmount": (457, 457),
    "listmount": (458, 458), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "unshare": (272, 97), "setns": (308, 268), "sethostname": (170, 161), "setdomainname": (171, 162),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "init_module": (175, 105),
    "delete_module": (176, 106), "finit_module": (313, 273), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116), "vhangup": (153, 58),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None),
    "personality": (135, 92), "nfsservctl": (180, 42), "lookup_dcookie": (212, 18),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "vmsplice": (278, 75),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190),
    "semctl": (66, 191), "semop": (65, 193), "semtimedop": (220, 192), "msgget": (68, 186), "msgctl": (71, 187),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "process_mrelease": (448, 448),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "io_setup": (206, 0),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
}  # fmt: skip
UNCOUNTED: dict[str, tuple[int | None, int | None]] = {
    "epoll_create": (213, None), "epoll_create1": (291, 20),
}  # fmt: skip
"""Refused as well where no control group counts the kernel's memory."""
OF_ITSELF: dict[str, tuple[int | None, int | None]] = {
    "prlimit64": (302, 261), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
}  # fmt: skip
"""Their first argument is a process; 0 is the caller."""
_CLONE, _CLONE3 = (56, 220), (435, 435)
_SOCKET, _SOCKETPAIR, _IOCTL = (41, 198), (53, 199), (16, 29)
_MMAP, _FCNTL, _SETSOCKOPT, _PRCTL = (9, 222), (72, 25), (54, 208), (157, 167)
_SETPRIORITY, _IOPRIO_SET = (141, 140), (251, 30)
_PRIO_USER, _IOPRIO_WHO_USER = 2, 3
_MAP_TYPE, _MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x0F, 0x01, 0x20, 0x40000
_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ = 1024, 1026, 1031
_SOL_SOCKET, _SO_SNDBUF, _SO_SNDBUFFORCE = 1, 7, 32
_PR_SCHED_CORE = 62


def filter_for(machine: str, *, has_group: bool) -> bytes:
    """The filter as the kernel reads it, for "x86_64" or "aarch64".

    Args:
        machine: the kind of processor.
        has_group: a control group counts the memory of the sandbox.

    Raises:
        OSError: there is no list for this machine.
    """
    if machine not in _ARCH:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}; use x86_64 or aarch64")
    column = 0 if machine == "x86_64" else 1
    code = [
        _step(_LOAD, _ARCH_AT),
        _step(_JUMP_EQUAL, _ARCH[machine], 1, 0),
        _result(_KILL),
        _step(_LOAD, _NUMBER_AT),
        # Above the list, which includes the x32 calls of x86-64 (bit 30): a kernel without them says the same.
        _step(_JUMP_ABOVE_OR_EQUAL, _LAST_KNOWN + 1, 0, 1),
        _result(_ERRNO | errno.ENOSYS),
        # The C library tries clone3 first and takes clone, whose flags a filter can read, where it is missing.
        _step(_JUMP_EQUAL, _CLONE3[column], 0, 1),
        _result(_ERRNO | errno.ENOSYS),
    ]
    for numbers in (REFUSED if has_group else {**REFUSED, **UNCOUNTED}).values():
        number = numbers[column]
        if number is not None:
            code += [_step(_JUMP_EQUAL, number, 0, 1), _REFUSE]
    for numbers in OF_ITSELF.values():
        number = numbers[column]
        assert number is not None, "both machines have it"
        code += _rule(number, _unless_zero(0))
    for call, all_processes in ((_SETPRIORITY, _PRIO_USER), (_IOPRIO_SET, _IOPRIO_WHO_USER)):
        code += _rule(call[column], _if_equal(0, all_processes), _unless_zero(1))
    code += _rule(_CLONE[column], _if_any_bit(0, _NEW_NAMESPACE_FLAGS))
    no_family = _result(_ERRNO | errno.EAFNOSUPPORT)
    for call in (_SOCKET, _SOCKETPAIR):
        code += _rule(call[column], [_argument(0), _step(_JUMP_EQUAL, _AF_UNIX, 1, 0), no_family])
    code += _rule(_IOCTL[column], _if_equal(1, _TIOCSTI), _if_equal(1, _TIOCLINUX))
    code += _rule(
        _FCNTL[column], *(_if_equal(1, command) for command in (_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ))
    )
    code += _rule(
        _SETSOCKOPT[column],
        [_argument(1), _step(_JUMP_EQUAL, _SOL_SOCKET, 0, 4), _argument(2), _step(_JUMP_EQUAL, _SO_SNDBUF, 1, 0),
         _step(_JUMP_EQUAL, _SO_SNDBUFFORCE, 0, 1), _REFUSE],
    )  # fmt: skip
    code += _rule(_PRCTL[column], _if_equal(0, _PR_SCHED_CORE))
    code += _rule(
        _MMAP[column], _if_any_bit(3, _MAP_HUGETLB), *([] if has_group else [_SHARED_AND_ANONYMOUS])
    )
    return b"".join([*code, _result(_ALLOW)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _result(value: int) -> bytes:
    return _step(_RETURN, value)


_REFUSE = _result(_ERRNO | errno.EPERM)


def _rule(number: int, *tests: list[bytes]) -> list[bytes]:
    """Carry out tests for one call; the number is loaded again after them."""
    steps = [step for test in tests for step in test]
    return [_step(_JUMP_EQUAL, number, 0, len(steps) + 1), *steps, _step(_LOAD, _NUMBER_AT)]


def _argument(position: int) -> bytes:
    return _step(_LOAD, _ARGUMENTS_AT[position])


def _if_equal(position: int, value: int) -> list[bytes]:
    return [_argument(position), _step(_JUMP_EQUAL, value, 0, 1), _REFUSE]


def _unless_zero(position: int) -> list[bytes]:
    return [_argument(position), _step(_JUMP_EQUAL, 0, 1, 0), _REFUSE]


def _if_any_bit(position: int, bits: int) -> list[bytes]:
    return [_argument(position), _step(_JUMP_ANY_BIT, bits, 0, 1), _REFUSE]


_SHARED_AND_ANONYMOUS = [
    _argument(3), _step(_AND, _MAP_TYPE | _MAP_ANONYMOUS), _step(_JUMP_EQUAL, _MAP_SHARED | _MAP_ANONYMOUS, 0, 1),
    _REFUSE,
]  # fmt: skip
