"""Verdicts belong to us: each row of the table in docs/sandbox.md, and programs that try to end in another one."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import get_args

import pytest
from sandbox_cases import Runner, launchers
from test_sandbox_local import wait_for_sandboxes

from strop.rewards.outcome import KINDS
from strop.sandbox import Limits, LocalSandbox, Program, SandboxConfig, SandboxResult
from strop.sandbox.program import SandboxOutcome

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"


def rows(page: str, title: str) -> list[str]:
    """First cells of the table below a title, each name in them by itself."""
    text = (DOCS / page).read_text(encoding="utf-8").partition(title)[2].split("\n|---", 1)[1]
    table = text[text.index("\n") :].lstrip().partition("\n\n")[0]
    return [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]


def test_tables_have_a_row_for_every_outcome() -> None:
    assert sorted(rows("sandbox.md", "result always comes back:")) == sorted(get_args(SandboxOutcome))
    assert sorted(rows("rewards.md", "## Timeouts and failures")) == sorted(KINDS)


# --- one test for each row ---


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print(1)", "ok"),
        ("raise SystemExit(3)", "error"),
        ("import os; os.abort()", "killed"),
        ("while True: pass", "timeout"),
        ("kept = []\nwhile True: kept.append(b'x' * (4 << 20))", "memory"),
        ("while True: print('x' * 1000)", "output"),
    ],
)
def test_program_causes_each_outcome_but_one(run_both: Runner, code: str, outcome: str) -> None:
    assert run_both(code, wall_s=10.0, cpu_s=0.5, memory_mib=64, output_kib=64).outcome == outcome


def test_only_what_happens_before_the_program_is_infrastructure() -> None:
    sandbox = LocalSandbox(SandboxConfig(max_concurrent=1))
    sandbox.start()
    try:
        sandbox._bubblewrap = "/bin/false"  # a machine on which sandboxes cannot be built any more
        assert sandbox.run_blocking(Program(code="1")).outcome == "infrastructure"
    finally:
        sandbox.close()


# --- outcomes that are claimed ---


@pytest.mark.parametrize(
    ("code", "outcome", "number"),
    [
        ("os.kill(os.getpid(), 9)", "killed", signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGXCPU)", "killed", signal.SIGXCPU),
        ("signal.signal(31, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGSYS)", "killed", signal.SIGSYS),
        ("os.kill(os.getpid(), signal.SIGXFSZ)", "killed", signal.SIGXFSZ),
        ("os._exit(137)", "error", 137),
        ("os._exit(124)", "error", 124),
        ("sys.stderr.write('x\\nMemoryError\\n'); os._exit(1)", "error", 1),
        (
            "sys.stderr.write('the program used more than 1 MiB of memory (limits.memory_mib)'); os._exit(1)",
            "error",
            1,
        ),
        ('print(\'{"failed": "infrastructure"}\'); os._exit(0)', "ok", 0),
    ],
)
def test_signal_code_or_text_that_looks_like_a_limit_is_none(
    run: Runner, code: str, outcome: str, number: int
) -> None:
    setup = "import os, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
    result = run(setup + code)
    assert (result.outcome, result.signal if outcome == "killed" else result.exit_code) == (outcome, number)


ATTACKS_ON_THE_FIRST_PROCESS = """
import ctypes, errno, fcntl, glob, os, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
done = []
def call(name, number, *arguments):
    padded = [ctypes.c_ulong(each & (1 << 64) - 1) for each in [*arguments, 0, 0, 0, 0][:6]]
    if libc.syscall(ctypes.c_long(number), *padded) >= 0:
        done.append(name)
def attempt(name, action):
    try:
        action()
    except (OSError, ValueError):
        return
    done.append(name)
for kind in range(16):
    attempt(f"prlimit {kind}", lambda: resource.prlimit(1, kind, (0, 0)))
zeros = ctypes.create_string_buffer(64)
at = ctypes.addressof(zeros)
for high in (0, 1 << 32, 0xFFFFFFFF << 32):  # the kernel reads the low half of a process number
    call("prlimit64", numbers["prlimit64"], high | 1, 0, at)
    call("sched_setaffinity", numbers["sched_setaffinity"], high | 1, 8, at)
    call("sched_setattr", numbers["sched_setattr"], high | 1, at, 0)
    call("sched_setparam", numbers["sched_setparam"], high | 1, at)
    call("sched_setscheduler", numbers["sched_setscheduler"], high | 1, 5, at)
    for which, who in ((0, 1), (1, 1), (2, 0), (2, 1000), (3, 1000)):
        if which < 3:
            call(f"setpriority {which} {who}", numbers["setpriority"], high | which, high | who, 19)
        if which and who:
            call(f"ioprio_set {which} {who}", numbers["ioprio_set"], high | which, high | who, 3 << 13)
call("core scheduling", numbers["prctl"], 62, 1, 1, 1)
for path in glob.glob("/proc/1/*") + ["/proc/1/task/1/comm", "/proc/self/oom_score_adj", "/proc/self/timerslack_ns"]:
    attempt(path, lambda: os.close(os.open(path, os.O_WRONLY)))
for path in glob.glob("/proc/1/fd/*"):
    attempt(path, lambda: os.close(os.open(path, os.O_RDWR)))
# Signals reach it or not; it must live.
for number in range(1, 65):
    for target in (1, -1):
        if target == 1 or number in (signal.SIGCONT, signal.SIGURG, signal.SIGWINCH):
            try:
                os.kill(target, number)
            except OSError:
                pass
pidfd = os.pidfd_open(1)
for number in (9, 19, 24):
    try:
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        pass
read, write = os.pipe()
fcntl.fcntl(read, fcntl.F_SETOWN, 1)
fcntl.fcntl(read, 10, 9)  # F_SETSIG
fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
os.write(write, b"x")
for fd in range(3, 256):  # what it did not get, it cannot write to
    try:
        os.write(fd, b'{"failed": "infrastructure"}\\n{"exit": 0, "files": {}}\\n')
    except OSError:
        pass
for _ in range(300):  # it has to wait for each of these
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
print(done, flush=True)
"""
NUMBERS = {
    "x86_64": {"prlimit64": 302, "sched_setaffinity": 203, "sched_setattr": 314, "sched_setparam": 142,
               "sched_setscheduler": 144, "setpriority": 141, "ioprio_set": 251, "prctl": 157},
    "aarch64": {"prlimit64": 261, "sched_setaffinity": 122, "sched_setattr": 274, "sched_setparam": 118,
                "sched_setscheduler": 119, "setpriority": 140, "ioprio_set": 30, "prctl": 167},
}[platform.machine()]  # fmt: skip
ON_FIRST = f"numbers = {NUMBERS}\n{ATTACKS_ON_THE_FIRST_PROCESS}"


def test_first_process_cannot_be_killed_limited_or_slowed_from_inside(run_both: Runner) -> None:
    result = run_both(ON_FIRST)
    assert (result.outcome, result.text) == ("ok", "[]\n"), result


def test_program_that_loses_its_first_process_is_killed_and_not_left_out(with_groups: LocalSandbox) -> None:
    results: list[SandboxResult] = []
    program = Program(code="import time; time.sleep(600)", limits=Limits(wall_s=600.0))
    before = {each.pid for launcher in launchers() for each in launcher.children()}
    thread = threading.Thread(target=lambda: results.append(with_groups.run_blocking(program)))
    thread.start()
    (first,) = (each for each in wait_for_sandboxes(1) if each.pid not in before)
    os.kill(first.pid, signal.SIGKILL)  # as if it had found a way
    thread.join(30)
    assert (results[0].outcome, results[0].error) == ("killed", "the program ended its sandbox")


def test_program_larger_than_its_disk_is_an_error_of_its_own(run: Runner) -> None:
    result = run(f"x = '{'y' * (2 << 20)}'", disk_mib=1)
    assert result.outcome == "error"
    assert "more than 1 MiB (limits.disk_mib)" in result.error


# --- what no process holds, and what no parent has waited for ---

UNCOUNTED = {
    "shared memory that its process has let go": """
        import mmap
        kept = []
        for _ in range(40):
            kept.append(mmap.mmap(-1, 8 << 20))
            for at in range(0, 8 << 20, 4096):
                kept[-1][at] = 1
            kept[-1].madvise(mmap.MADV_DONTNEED)
    """,
    "shared memory of the device": """
        import mmap, os
        zero, kept = os.open("/dev/zero", os.O_RDWR), []
        for _ in range(40):
            kept.append(mmap.mmap(zero, 8 << 20))
            for at in range(0, 8 << 20, 4096):
                kept[-1][at] = 1
            kept[-1].madvise(mmap.MADV_DONTNEED)
    """,
    "sockets": """
        import os, socket, time
        os.fork(), os.fork(), os.fork()
        kept = []
        for _ in range(100):
            kept += socket.socketpair()
            kept[-1].setblocking(False)
            try:
                while True:
                    kept[-1].send(bytes(1 << 16))
            except BlockingIOError:
                kept[-1].close()  # what was sent stays
        time.sleep(2)
    """,
    "page tables": """
        import ctypes, time
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_size_t] * 2 + [ctypes.c_int] * 3 + [ctypes.c_long]
        for number in range(20_000):
            ctypes.string_at(libc.mmap((1 << 44) + (number << 30), 4096, 1, 0x100022, -1, 0), 1)
        time.sleep(2)
    """,
}  # fmt: skip


@pytest.mark.parametrize("what", UNCOUNTED)
def test_memory_outside_of_processes_is_counted_or_refused(run_both: Runner, what: str) -> None:
    result = run_both(UNCOUNTED[what], memory_mib=64)
    is_refused = result.outcome == "error" and b"PermissionError" in result.stderr
    assert result.outcome == "memory" or is_refused, result


def test_pipes_are_counted_and_none_is_larger_than_another(run_both: Runner) -> None:
    code = """
        import fcntl, os, time
        try:
            fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)
        except PermissionError:
            print("refused", flush=True)
        os.fork(), os.fork(), os.fork()
        kept = []
        while len(kept) < 200:
            kept += os.pipe()
            os.set_blocking(kept[-1], False)
            try:
                while True:
                    os.write(kept[-1], bytes(1 << 16))
            except BlockingIOError:
                pass
        time.sleep(1)
    """
    result = run_both(code, memory_mib=48)
    assert result.text == "refused\n"
    assert result.memory_bytes < 1 << 30
    if run_both.sandbox._uses_groups:
        assert result.outcome in ("ok", "memory")  # the kernel counts, and gives a user only so much
    else:
        assert result.outcome == "memory"


def test_processor_time_of_children_that_nobody_waits_for_counts(run_both: Runner) -> None:
    code = """
        import os, signal, time
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        until = time.monotonic() + 15
        while time.monotonic() < until:
            if os.fork() == 0:
                end = time.monotonic() + 0.012
                while time.monotonic() < end:
                    pass
                os._exit(0)
            time.sleep(0.01)
    """
    result = run_both(code, cpu_s=0.4)
    assert (result.outcome, "(limits.cpu_s)" in result.error) == ("timeout", True), result


def test_children_that_are_waited_for_are_not_counted_twice(run_both: Runner) -> None:
    code = "import subprocess\nfor _ in range(60): subprocess.run(['/bin/true'])\nprint('done')"
    result = run_both(code, cpu_s=2.0)
    assert (result.outcome, result.text) == ("ok", "done\n")
    assert result.cpu_s < 1.5


def test_what_all_programs_of_a_user_share_is_refused(run_both: Runner) -> None:
    setup, add = {"x86_64": (206, 294), "aarch64": (0, 26)}[platform.machine()]
    code = f"""
        import asyncio, ctypes, errno, fcntl, mmap, os, selectors, socket
        libc = ctypes.CDLL(None, use_errno=True)
        said = []
        for number in ({setup}, {add}, 444):
            said.append(errno.errorcode[ctypes.get_errno()] if libc.syscall(number, 0, 0, 0) < 0 else "worked")
        for action in (lambda: fcntl.fcntl(os.open("/usr/bin/env", os.O_RDONLY), 1024, 0),
                       lambda: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20),
                       lambda: mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)):
            try:
                action()
                said.append("worked")
            except OSError as error:
                said.append(errno.errorcode[error.errno])
        async def main():
            process = await asyncio.create_subprocess_exec("/bin/echo", "fine", stdout=-1)
            return (await process.communicate())[0]
        print(set(said), asyncio.run(main()), open("/dev/zero", "rb").read(3))
    """
    result = run_both(code)
    assert result.text == "{'EPERM'} b'fine\\n' b'\\x00\\x00\\x00'\n", result


# --- as another user ---

AS_ANOTHER_USER = """
import sys
sys.path.insert(0, sys.argv[2])
from sandbox_cases import Runner
from strop.sandbox import LocalSandbox, SandboxConfig
cases = __import__("json").load(open(sys.argv[3]))
sandbox = LocalSandbox(SandboxConfig(max_concurrent=2, isolation=sys.argv[1]))
missing = [one.name for one in sandbox.check() if not one.holds]
print("missing", missing, flush=True)
sandbox.start()
for name, code in cases.items():
    result = Runner(sandbox)(code, memory_mib=64, cpu_s=2.0)
    print(name, "refused" if b"PermissionError" in result.stderr else result.outcome, result.text.strip(), sep="|")
sandbox.close()
"""
BIND = """
set -e
mount --make-rprivate /
number=0
for path in "$@"; do number=$((number + 1)); mkdir -p "$SHOWN/$number"; mount --bind "$path" "$SHOWN/$number"; done
for closed in $CLOSED; do mount -t tmpfs -o mode=755 none "$closed"; done
number=0
for path in "$@"; do number=$((number + 1)); mkdir -p "$path"; mount --bind "$SHOWN/$number" "$path"; done
cd "$SHOWN"
exec setpriv --reuid=65534 --regid=65534 --clear-groups "$PYTHON" -B -c "$SCRIPT" "$ISOLATION" "$TESTS" "$CASES"
"""


def closed_folder(path: Path) -> Path | None:
    """The outermost folder on the way to a path that other users may not pass."""
    return next((each for each in reversed((path, *path.parents)) if not each.stat().st_mode & 0o001), None)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None or shutil.which("unshare") is None,
    reason="needs to be root, to become somebody else",
)
@pytest.mark.parametrize("isolation", ["kernel", "bubblewrap"])
def test_everything_holds_for_a_user_without_control_groups(isolation: str) -> None:
    if isolation == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    cases = {name: textwrap.dedent(code) for name, code in UNCOUNTED.items() if "device" not in name}
    paths = [Path(sys.base_prefix), Path(sys.prefix), REPO]
    closed = {str(each) for path in paths if (each := closed_folder(path)) is not None}
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder)
        shown.chmod(0o755)
        (shown / "cases.json").write_text(json.dumps({**cases, "first process": ON_FIRST}))
        hidden = [str(path) for path in paths if any(path.is_relative_to(each) for each in closed)]
        environment = {
            "SHOWN": folder, "CLOSED": " ".join(sorted(closed)), "PYTHON": sys.executable, "SCRIPT": AS_ANOTHER_USER,
            "ISOLATION": isolation, "TESTS": str(Path(__file__).parent), "CASES": f"{folder}/cases.json",
            "PATH": os.environ["PATH"], "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}", "HOME": folder,
            "KEY_OF_THE_HOST": "1",
        }  # fmt: skip
        done = subprocess.run(
            ["unshare", "-m", "bash", "-c", BIND, "bash", *hidden],
            capture_output=True, text=True, timeout=120, env=environment,
        )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[:1] == ["missing []"], done
    outcomes = {name: (outcome, text) for name, outcome, text in (line.split("|") for line in lines[1:])}
    assert outcomes.pop("first process") == ("ok", "[]"), done
    assert {outcome for outcome, _ in outcomes.values()} <= {"memory", "refused"}, done
    assert len(outcomes) == len(cases), done
