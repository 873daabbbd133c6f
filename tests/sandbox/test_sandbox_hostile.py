"""Programs that try to get out, to stay, or to take more than their share. Each test says what must hold."""

from __future__ import annotations

import errno
import json
import os
import pickle
import platform
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from sandbox_cases import SECRET, Runner

from strop.sandbox import Limits, Program
from strop.sandbox.seccomp import REFUSED

REPO = Path(__file__).parents[2]


# --- processes ---


def test_fork_bomb_ends_with_its_time_and_the_host_goes_on(run_both: Runner) -> None:
    code = """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
    """
    assert run_both(code, wall_s=0.5, max_processes=16).outcome == "timeout"
    assert run_both("print(1)").text == "1\n"


def test_number_of_processes_and_threads_is_limited(run_both: Runner) -> None:
    code = """
        import os, threading, time
        children = []
        try:
            while True:
                pid = os.fork()
                if pid == 0:
                    time.sleep(60)
                    os._exit(0)
                children.append(pid)
        except OSError:
            pass
        forks = len(children)
        for pid in children:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        threads = 0
        try:
            while True:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                threads += 1
        except RuntimeError:
            pass
        print(forks, threads, flush=True)
        os._exit(0)
    """
    forks, threads = map(int, run_both(code, max_processes=12).text.split())
    assert 5 <= forks <= 12
    assert 5 <= threads <= 12


def test_daemon_does_not_outlive_its_program(run: Runner) -> None:
    code = """
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)  # holds standard output open
            os._exit(0)
        print("parent ends", flush=True)
        os._exit(0)
    """
    started = time.monotonic()
    result = run(code)
    assert (result.outcome, result.text) == ("ok", "parent ends\n")
    assert time.monotonic() - started < 15


def test_endless_loop_ends_on_the_clock(run: Runner) -> None:
    result = run("while True: pass", wall_s=0.3)
    assert result.outcome == "timeout"
    assert "did not finish in 0.3 s (limits.wall_s)" in result.error
    assert result.exit_code is None
    assert 0.3 <= result.wall_s < 5


def test_sleep_ends_on_the_clock_though_it_uses_no_processor(run: Runner) -> None:
    assert run("import time; time.sleep(600)", wall_s=0.3).outcome == "timeout"


def test_processor_time_of_all_processes_counts(run_both: Runner) -> None:
    code = """
        import os
        for _ in range(3):
            os.fork()
        while True:
            pass
    """
    result = run_both(code, wall_s=20.0, cpu_s=0.4)
    assert result.outcome == "timeout"
    assert "more than 0.4 s of processor time (limits.cpu_s)" in result.error
    assert result.wall_s < 15


def test_signals_to_parent_init_and_everybody_change_nothing(run: Runner) -> None:
    code = """
        import os, signal, sys
        for target in (os.getppid(), 1, -1):
            for name in ("SIGTERM", "SIGINT", "SIGSTOP", "SIGKILL", "SIGHUP", "SIGUSR1"):
                try:
                    os.kill(target, getattr(signal, name))
                except OSError:
                    pass
        print("done", flush=True)
    """
    result = run(code)
    assert (result.outcome, result.text) == ("ok", "done\n")


def test_program_that_kills_its_own_group_is_killed_and_nothing_else(run: Runner) -> None:
    result = run("import os; os.kill(0, 9)")
    assert (result.outcome, result.signal, result.exit_code) == ("killed", int(signal.SIGKILL), None)
    assert "died with SIGKILL" in result.error


def test_program_that_ignores_or_stops_itself_still_ends(run: Runner) -> None:
    ignoring = """
        import signal
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            pass
    """
    assert run(ignoring, wall_s=0.5).outcome == "timeout"
    assert run("import os; os.kill(os.getpid(), 19)", wall_s=0.3).outcome == "timeout"


# --- files ---


def test_files_of_the_host_cannot_be_read(run: Runner) -> None:
    module = str(Path(psutil.__file__).parent)
    paths = [
        "/etc/shadow", "/etc/hostname", "/etc/ssl", "../../../../etc/shadow", "/box/../etc/shadow",
        "/proc/1/root/etc/shadow",
        "/proc/self/root/etc/shadow", f"/proc/self/cwd/../{REPO}", str(REPO / "pyproject.toml"), str(REPO), module,
        "/proc/1/environ", "/proc/1/mem", "/proc/1/fd/0", "/proc/1/maps", "/proc/kcore",
        "/proc/sysrq-trigger", "/.host",
        "/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/sda", "/dev/tty", "/sys/kernel", "/sys/fs/cgroup", "/home",
        "/var/log", "/run", "/mnt", "/boot", str(Path.home() / ".bashrc"), str(Path.home() / ".ssh"),
        "/dev/shm/../../etc/shadow",
    ]  # fmt: skip
    code = f"""
        import os
        for path in {paths!r}:
            try:
                found = os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(100)
            except OSError:
                continue
            if found:
                print(path, found)
    """
    assert run(code).text == ""


def test_home_folder_shows_the_way_to_the_interpreter_and_nothing_else(run: Runner) -> None:
    code = f"import os\nfor entry in os.walk({str(Path.home())!r}):\n    print(entry[2])\n    break"
    assert run(code).text in ("", "[]\n")


def test_links_to_the_host_are_not_brought_back(run: Runner) -> None:
    code = """
        import os
        os.symlink("/etc/passwd", "link")
        os.symlink("/", "root")
        os.symlink("/proc/1", "init")
        os.mkfifo("pipe")
        os.mkdir("folder")
        open("plain", "w").write("mine")
    """
    names = ("link", "root/etc/passwd", "init/environ", "init/cmdline", "pipe", "folder", "missing", "plain")
    assert run(code, fetch=names).files == {"plain": b"mine"}


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", ".", "a\0b"])
def test_file_names_that_leave_the_work_folder_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be relative and stay in the work folder"):
        Program(code="1", files={name: b""})
    with pytest.raises(ValueError, match="must be relative and stay in the work folder"):
        Program(code="1", fetch=(name,))


def test_system_cannot_be_written(run: Runner) -> None:
    code = """
        import os, sys
        for path in ("/x", "/usr/x", "/usr/bin/python3", "/etc/passwd", "/etc/x", "/bin/sh", "/lib/x", "/dev/x",
                     "/proc/sys/kernel/core_pattern", "/proc/1/oom_score_adj", os.__file__, sys.executable):
            for mode in ("w", "a", "r+"):
                try:
                    open(path, mode).close()
                    print(path, mode)
                except OSError:
                    pass
        for action in (lambda: os.chmod("/usr", 0o777), lambda: os.rename("/usr", "/u"), lambda: os.unlink("/bin"),
                       lambda: os.mkdir("/y"), lambda: os.rmdir("/tmp")):
            try:
                action()
                print("done")
            except OSError:
                pass
    """
    assert run(code).text == ""


def test_nothing_passes_from_one_program_to_the_next(run: Runner) -> None:
    places = ["/box/left", "/tmp/left", "/dev/shm/left"]
    write = f"for path in {places!r}:\n    open(path, 'w').write('here')\nprint('written')"
    assert run(write).text == "written\n"
    look = f"import os\nprint([path for path in {places!r} if os.path.exists(path)], os.listdir('/tmp'))"
    assert run(look).text == "[] []\n"


def test_disk_and_files_are_limited(run: Runner) -> None:
    code = """
        import os
        try:
            with open("large", "wb") as file:
                while True:
                    file.write(bytes(1 << 20))
        except OSError as error:
            print(error.errno, os.path.getsize("large") >> 20)
        total, number = 0, 0
        try:
            while True:
                folder = ("/box", "/tmp", "/dev/shm")[number % 3]
                with open(f"{folder}/{number}", "wb", buffering=0) as file:
                    total += file.write(bytes(1 << 20))
                number += 1
        except OSError as error:
            print(error.errno, total >> 20)
        try:
            while True:
                open(f"/tmp/small{number}", "w").close()
                number += 1
        except OSError as error:
            print(error.errno, number < 9000)
    """
    lines = run(code, file_mib=4, disk_mib=16, memory_mib=256).text.splitlines()
    assert lines[0] == f"{errno.EFBIG} 4"
    number, total = map(int, lines[1].split())
    assert number == errno.ENOSPC
    assert total <= 12
    assert lines[2] == f"{errno.ENOSPC} True"


def test_number_of_open_files_is_limited(run: Runner) -> None:
    code = """
        files = []
        try:
            while True:
                files.append(open("/dev/null"))
        except OSError as error:
            print(error.errno, len(files))
    """
    number, count = map(int, run(code, max_open_files=32).text.split())
    assert number == errno.EMFILE
    assert count <= 32


# --- memory and output ---


def test_memory_bomb_ends_as_memory(run_both: Runner) -> None:
    code = "kept = []\nwhile True:\n    kept.append(b'x' * (4 << 20))"
    result = run_both(code, memory_mib=64)
    assert result.outcome == "memory"
    assert "more than 64 MiB of memory (limits.memory_mib)" in result.error


def test_memory_of_many_processes_counts_together(run_both: Runner) -> None:
    code = """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                kept = bytearray(b"x" * (20 << 20))
                time.sleep(60)
        time.sleep(60)
    """
    assert run_both(code, memory_mib=64, wall_s=10.0).outcome == "memory"


def test_one_giant_request_for_memory_is_refused_at_once(run_both: Runner) -> None:
    result = run_both("'x' * (1 << 45)", memory_mib=64)
    assert (result.outcome, result.exit_code) == ("error", 1)  # no limit of ours refused it
    assert result.stderr.endswith(b"MemoryError\n")


@pytest.mark.parametrize("stream", [1, 2])
def test_endless_output_is_cut_and_ended(run: Runner, stream: int) -> None:
    result = run(f"import os\nwhile True: os.write({stream}, b'y' * 9999)", output_kib=8)
    assert (result.outcome, result.is_truncated) == ("output", True)
    cut, other = (result.stdout, result.stderr) if stream == 1 else (result.stderr, result.stdout)
    assert (cut, other) == (b"y" * 8192, b"")
    assert "wrote more than 8 KiB of standard" in result.error


def test_output_of_exactly_the_limit_is_whole(run: Runner) -> None:
    result = run("import os; os.write(1, b'y' * 8192)", output_kib=8)
    assert (result.outcome, result.is_truncated, len(result.stdout)) == ("ok", False, 8192)


def test_output_is_bytes_that_nobody_unpickles(run: Runner, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"""
        import os, pickle, sys
        class Payload:
            def __reduce__(self):
                return (open, ({str(mark)!r}, "w"))
        data = pickle.dumps(Payload())
        open("result.pkl", "wb").write(data)
        sys.stdout.buffer.write(data)
    """
    result = run(code, fetch=("result.pkl",))
    assert result.outcome == "ok"
    assert result.stdout == result.files["result.pkl"]
    assert result.stdout.startswith(pickle.PROTO)
    assert not mark.exists()


# --- network, processes of the host, privileges ---


def test_no_socket_leads_out(run: Runner, tmp_path: Path) -> None:
    name = f"strop-test-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        udp.bind(("127.0.0.1", 0))
        abstract.bind("\0" + name)
        abstract.listen()
        named.bind(str(tmp_path / "s"))
        named.listen()
        for each in (tcp, udp, abstract, named):
            each.setblocking(False)
        code = f"""
            import socket
            def attempt(family, kind, action):
                try:
                    with socket.socket(family, kind) as one:
                        one.settimeout(1)
                        action(one)
                        print(family, kind, "reached")
                except OSError:
                    pass
            s = socket
            port, datagrams = {tcp.getsockname()[1]}, {udp.getsockname()[1]}
            for host in ("127.0.0.1", "0.0.0.0", "169.254.169.254", "192.0.2.1"):
                attempt(s.AF_INET, s.SOCK_STREAM, lambda one: one.connect((host, port)))
                attempt(s.AF_INET, s.SOCK_DGRAM, lambda one: one.sendto(b"x", (host, datagrams)))
            attempt(s.AF_INET6, s.SOCK_STREAM, lambda one: one.connect(("::1", port)))
            attempt(s.AF_INET, s.SOCK_RAW, lambda one: None)
            attempt(s.AF_PACKET, s.SOCK_RAW, lambda one: None)
            attempt(s.AF_NETLINK, s.SOCK_RAW, lambda one: None)
            attempt(s.AF_VSOCK, s.SOCK_STREAM, lambda one: None)
            attempt(s.AF_ALG, s.SOCK_SEQPACKET, lambda one: None)
            attempt(s.AF_UNIX, s.SOCK_STREAM, lambda one: one.connect("\\0{name}"))
            attempt(s.AF_UNIX, s.SOCK_STREAM, lambda one: one.connect({str(tmp_path / "s")!r}))
            try:
                print(s.getaddrinfo("example.com", 80))
            except OSError:
                pass
            a, b = s.socketpair()
            a.sendall(b"inside")
            print(b.recv(10))
        """
        assert run(code).text == "b'inside'\n"
        for each in (tcp, abstract, named):
            with pytest.raises(BlockingIOError):
                each.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(10)


def test_only_processes_of_the_sandbox_are_visible(run: Runner) -> None:
    code = f"""
        import os
        print([int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.exists("/proc/self") else [1])
        for pid in ({os.getpid()}, {os.getppid()}):
            try:
                os.kill(pid, 0)
                print("found", pid)
            except ProcessLookupError:
                pass
    """
    assert set(json.loads(run(code).text)) <= {1, 2, 3}


def test_environment_of_the_host_is_not_visible(run: Runner) -> None:
    code = """
        import os
        print(sorted(os.environ))
        for pid in ("1", "2", "self"):
            try:
                print(open(f"/proc/{pid}/environ").read(), open(f"/proc/{pid}/cmdline").read())
            except OSError:
                pass
    """
    text = run(code).text
    assert os.environ["STROP_TEST_SECRET"] == SECRET
    assert SECRET not in text
    assert str(REPO) not in text
    assert "'PATH'" in text


def test_refused_system_calls_are_refused(run: Runner) -> None:
    column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    numbers = {name: each[column] for name, each in REFUSED.items() if each[column] is not None}
    clone, clone3, newest = {"x86_64": 56, "aarch64": 220}[platform.machine()], 435, 9999
    code = f"""
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        def call(number, *arguments):
            padded = [*arguments, 0, 0, 0, 0, 0][:5]
            result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, padded))
            return "worked" if result >= 0 else errno.errorcode[ctypes.get_errno()]
        for name, number in {numbers!r}.items():
            if (said := call(number)) != "EPERM":
                print(name, said)
        for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
            print(call({clone}, flag), end=" ")
        print(call({clone3}), call({newest}), call(0x40000000 + 39))
    """
    assert run(code).text == "EPERM " * 7 + "ENOSYS ENOSYS ENOSYS\n"


def test_no_way_back_to_root(run: Runner) -> None:
    code = """
        import ctypes, os, shutil, subprocess
        print(os.getresuid(), os.getresgid(), os.getgroups() in ([], [1000], [65534], [65534, 65534]))
        for action in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgid(0),
                       lambda: os.setgroups([0]), lambda: os.chroot("/tmp"), lambda: os.nice(-1),
                       lambda: os.mknod("disk", 0o60666, os.makedev(254, 0)),
                       lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))):
            try:
                action()
                print("worked")
            except OSError:
                pass
        shutil.copy("/usr/bin/id", "id")
        os.chmod("id", 0o6755)
        print(subprocess.run(["./id", "-u"], capture_output=True, text=True).stdout.strip())
        libc = ctypes.CDLL(None)
        bounding = [number for number in range(41) if libc.prctl(23, number, 0, 0, 0) > 0]
        print(libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0), bounding)
        if os.path.exists("/proc/self/status"):
            print({line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")} == {"0" * 16})
    """
    lines = run(code).text.splitlines()
    assert lines[:3] == ["(1000, 1000, 1000) (1000, 1000, 1000) True", "1000", "1 2 []"]
    assert lines[3:] in ([], ["True"])


def test_program_with_a_terminal_escape_or_null_bytes_changes_nothing(run: Runner) -> None:
    result = run("import sys; sys.stdout.buffer.write(b'\\x1b]0;x\\x07\\0\\xff')")
    assert result.stdout == b"\x1b]0;x\x07\0\xff"
    assert Limits().output_kib == 256
