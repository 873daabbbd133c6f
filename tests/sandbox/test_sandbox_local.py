"""The pool of launchers: results, leases, deadlines, and what is left when something dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from program_path import python_path
from sandbox_cases import Runner, launchers

from strop.sandbox import (
    Limits,
    LocalSandbox,
    Program,
    SandboxConfig,
    SandboxResult,
    SandboxUnavailable,
    checking,
)  # fmt: skip
from strop.sandbox.cgroups import _homes

REPO = Path(__file__).parents[2]


def wait_until_gone(processes: list[psutil.Process], within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    for process in processes:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, f"{process} is still there"
            time.sleep(0.02)


def wait_for_sandboxes(count: int, within_s: float = 20.0) -> list[psutil.Process]:
    """The first processes of that many running sandboxes."""
    until = time.monotonic() + within_s
    while True:
        found = [child for launcher in launchers() for child in launcher.children() if child.children()]
        if len(found) >= count:
            return found
        assert time.monotonic() < until, "no sandbox has started"
        time.sleep(0.02)


# --- results ---


def test_result_says_what_the_program_did(run: Runner) -> None:
    code = """
        import sys
        print(sys.stdin.read().upper(), file=sys.stderr)
        open("out/made.txt", "w").write(open("out/given.txt").read() * 2)
        sys.exit(7)
    """
    result = run(code, files={"out/given.txt": b"ab"}, fetch=("out/made.txt", "none"), stdin=b"hello")
    assert (result.outcome, result.exit_code, result.signal) == ("error", 7, None)
    assert (result.stdout, result.stderr) == (b"", b"HELLO\n")
    assert result.files == {"out/made.txt": b"abab"}
    assert result.error == "the program exited with code 7"
    assert result.wall_s > 0
    assert result.start_s > 0
    assert result.cpu_s > 0
    assert result.memory_bytes > 1 << 20


def test_input_and_output_of_megabytes_pass_through(run: Runner) -> None:
    data = os.urandom(3 << 20)
    code = "import sys, shutil; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"
    assert run(code, stdin=data, output_kib=4096).stdout == data
    assert run("print(1)", stdin=data).text == "1\n"  # one that never reads it


def test_commands_and_bash_run(with_groups: LocalSandbox) -> None:
    command = Program(command=("sh", "-c", "cat given; exit 3"), files={"given": b"x"})
    result = with_groups.run_blocking(command)
    assert (result.text, result.exit_code) == ("x", 3)
    assert with_groups.run_blocking(Program(code="echo $((6 * 7))", language="bash")).text == "42\n"
    missing = with_groups.run_blocking(Program(command=("no-such-program",)))
    assert (missing.outcome, missing.exit_code) == ("error", 127)
    assert "no-such-program: No such file" in missing.error
    with pytest.raises(ValueError, match="python or bash, not 'cobol'"):
        with_groups.run_blocking(Program(code="x", language="cobol"))


def test_crash_of_an_interpreter_is_killed_with_its_signal(run: Runner) -> None:
    result = run("import ctypes; ctypes.string_at(0)")
    assert (result.outcome, result.signal, result.error) == (
        "killed",
        int(signal.SIGSEGV),
        "the program died with SIGSEGV",
    )


def test_standard_library_is_there_and_other_packages_are_not(run: Runner) -> None:
    assert run("import json, sqlite3, decimal, ssl, asyncio; print('fine')").text == "fine\n"
    assert "No module named 'pytest'" in run("import pytest").stderr.decode()


def test_interpreter_and_paths_of_the_users_choice_are_visible(tmp_path: Path) -> None:
    folder = tmp_path / "shown"
    folder.mkdir()
    (folder / "fact.txt").write_text("seen")
    (tmp_path / "environments").symlink_to(Path(sys.prefix).parent)  # as a user may have them on another disk
    python = tmp_path / "environments" / Path(sys.executable).relative_to(Path(sys.prefix).parent)
    config = SandboxConfig(python=str(python), read_only_paths=(str(folder),), num_warm=0)
    sandbox = LocalSandbox(config)
    sandbox.start()
    try:
        look = f"import sys, pytest; print(sys.prefix); print(open('{folder}/fact.txt').read())"
        code = f"{look}\nopen('{folder}/x', 'w')"
        result = sandbox.run_blocking(Program(code=code, limits=Limits(memory_mib=256)))
    finally:
        sandbox.close()
    assert result.text.splitlines() == [os.path.realpath(sys.prefix), "seen"]
    assert "Read-only file system" in result.stderr.decode()


# --- many at once, cancelled, closed ---


def test_more_programs_than_places_all_come_back_in_their_own_words(with_groups: LocalSandbox) -> None:
    async def run_all() -> list[SandboxResult]:
        return await asyncio.gather(*(with_groups.run(Program(code=f"print({n})")) for n in range(12)))

    assert [result.text for result in asyncio.run(run_all())] == [f"{n}\n" for n in range(12)]
    assert len(with_groups._idle) <= 4


def test_cancelled_program_is_ended_at_once() -> None:
    async def cancel() -> None:
        async with LocalSandbox(SandboxConfig(max_concurrent=1)) as sandbox:
            task = asyncio.create_task(
                sandbox.run(Program(code="import time; time.sleep(600)", limits=Limits(wall_s=600)))
            )
            before = (await asyncio.to_thread(wait_for_sandboxes, 1))[-1:]
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until_gone, before)
            assert (await sandbox.run(Program(code="print(2)"))).text == "2\n"  # the place is free again

    asyncio.run(cancel())


def test_closing_ends_what_runs() -> None:
    async def close() -> SandboxResult:
        async with LocalSandbox(SandboxConfig(max_concurrent=1)) as sandbox:
            task = asyncio.create_task(
                sandbox.run(Program(code="while True: pass", limits=Limits(wall_s=600, cpu_s=600)))
            )
            await asyncio.to_thread(wait_for_sandboxes, 1)
        return await task

    before = {each.pid for each in launchers()}
    assert asyncio.run(close()).outcome == "infrastructure"
    assert {each.pid for each in launchers()} == before


def test_wait_for_a_place_has_a_deadline() -> None:
    async def crowd() -> list[SandboxResult]:
        async with LocalSandbox(SandboxConfig(max_concurrent=1, queue_s=0.2)) as sandbox:
            running = asyncio.create_task(
                sandbox.run(Program(code="import time; time.sleep(600)", limits=Limits(wall_s=2.0)))
            )
            await asyncio.to_thread(wait_for_sandboxes, 1)
            late = asyncio.create_task(sandbox.run(Program(code="1")))
            in_thread = await asyncio.to_thread(sandbox.run_blocking, Program(code="1"))
            return [in_thread, await late, await running]

    in_thread, late, first = asyncio.run(crowd())
    for each in (in_thread, late):
        assert each.outcome == "infrastructure"
        assert (
            "no place became free within 0.2 s (reward.sandbox.queue_s, reward.sandbox.max_concurrent)"
            in each.error
        )
    assert first.outcome == "timeout"


def test_launcher_that_died_while_idle_is_replaced() -> None:
    sandbox = LocalSandbox(SandboxConfig(max_concurrent=1))
    sandbox.start()
    try:
        for launcher in sandbox._idle:
            os.kill(launcher.pid, signal.SIGKILL)
        assert sandbox.run_blocking(Program(code="print(1)")).text == "1\n"
    finally:
        sandbox.close()


def test_killed_launcher_takes_its_sandbox_with_it() -> None:
    async def kill() -> SandboxResult:
        async with LocalSandbox(SandboxConfig(max_concurrent=1, num_warm=0)) as sandbox:
            while sandbox._idle:  # those of the check; the program of a fresh launcher is not tried again
                sandbox._idle.pop().end()
            task = asyncio.create_task(
                sandbox.run(Program(code="while True: pass", limits=Limits(wall_s=600, cpu_s=600)))
            )
            first = (await asyncio.to_thread(wait_for_sandboxes, 1))[-1]
            family = [first, *first.children(recursive=True)]
            os.kill(first.ppid(), signal.SIGKILL)
            result = await task
            await asyncio.to_thread(wait_until_gone, family)
            return result

    result = asyncio.run(kill())
    assert result.outcome == "infrastructure"


DRIVER = """
import asyncio, sys
from strop.sandbox import Limits, LocalSandbox, Program, SandboxConfig

async def main():
    fork = "import os, time\\nif os.fork() == 0: os.setsid()\\ntime.sleep(600)"
    limits = Limits(wall_s=600.0)
    async with LocalSandbox(SandboxConfig(max_concurrent=3, num_warm=3)) as sandbox:
        tasks = [asyncio.create_task(sandbox.run(Program(code=fork, limits=limits))) for _ in range(2)]
        print("ready", flush=True)
        await asyncio.gather(*tasks)

asyncio.run(main())
"""


def test_nothing_is_left_after_the_driver_was_killed() -> None:
    command = [sys.executable, "-c", DRIVER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": python_path(REPO)}
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        until = time.monotonic() + 20
        while True:  # three launchers, two first processes, four of the programs
            family = psutil.Process(driver.pid).children(recursive=True)
            if len(family) == 9:
                break
            assert time.monotonic() < until, family
            time.sleep(0.02)
        owners = {process.pid for process in psutil.Process(driver.pid).children()}
        driver.send_signal(signal.SIGKILL)
    wait_until_gone(family)
    for home in _homes().values():
        left = [folder.name for folder in home.glob("strop-sandbox-*")]
        assert [name for name in left if int(name.split("-")[2]) in owners] == []


# --- fails closed ---


def test_sandbox_that_is_not_started_runs_nothing() -> None:
    with pytest.raises(RuntimeError, match="not running"):
        LocalSandbox().run_blocking(Program(code="1"))


WITHOUT_NAMESPACES = """
from strop.sandbox import LocalSandbox, SandboxUnavailable, kernel, seccomp
# As in a container that forbids user namespaces.
kernel.forbid_new_privileges()
clone = {"x86_64": 56, "aarch64": 220}[kernel.MACHINE]
refused = seccomp._rule(clone, seccomp._if_any_bit(0, 0x10000000))
kernel.install_filter(b"".join([seccomp._step(0x20, 0), *refused, seccomp._result(0x7FFF0000)]))
try:
    LocalSandbox().start()
except SandboxUnavailable as error:
    print(error)
"""


def test_machine_without_namespaces_is_refused_with_what_to_do() -> None:
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT_NAMESPACES], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": python_path(REPO)},
    ).stdout  # fmt: skip
    assert said.startswith("programs cannot be isolated here: ")
    assert "Programs are never run without isolation" in said


def answer_of(program: Program, broken: str) -> SandboxResult:
    """What a sandbox with every property but one says to the programs of the check."""
    if program.command:
        holds = {name: name != broken for name in checking._FAILURES}
        return SandboxResult(outcome="ok", stdout=json.dumps(holds).encode())
    if program.code == checking._REAPED_BY_KERNEL:
        wall = SandboxResult(outcome="timeout", error="the program did not finish in 20 s (limits.wall_s)")
        cpu = SandboxResult(outcome="timeout", error="more than 0.3 s of processor time (limits.cpu_s)")
        return wall if broken == "processor" else cpu
    name = next((name for name, code in checking._GREEDY.items() if code == program.code), "time")
    if name == broken:
        return SandboxResult(outcome="ok")
    if name == "shared memory":
        return SandboxResult(outcome="ok", stdout=b"refused\n")
    return SandboxResult(outcome="timeout" if name == "time" else "memory")


@pytest.mark.parametrize("broken", checking._FAILURES)
def test_each_property_is_required(broken: str) -> None:
    with pytest.raises(SandboxUnavailable, match=re.escape(checking._FAILURES[broken])):
        checking.require(lambda program: answer_of(program, broken), key=("test", broken))


def test_open_port_of_the_host_that_is_reached_is_seen() -> None:
    def run(program: Program) -> SandboxResult:
        if program.command:
            socket.create_connection(("127.0.0.1", int(program.command[3]))).close()
        return answer_of(program, "")

    assert [one.name for one in checking.check(run) if not one.holds] == ["network"]


@pytest.mark.parametrize(
    "name", ["PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "LC_CTYPE", "PWD", "TMPDIR", "SHLVL"]
)
def test_variable_that_both_sides_set_is_no_leak(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in list(os.environ):
        monkeypatch.delenv(each)
    monkeypatch.setenv(name, "1")
    assert checking._host_variable() == "STROP_NONE"
    monkeypatch.setenv("KEY_OF_THE_HOST", "1")
    assert checking._host_variable() == "KEY_OF_THE_HOST"


def test_bubblewrap_that_is_missing_or_would_be_root_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox = LocalSandbox(SandboxConfig(isolation="bubblewrap"))
    with pytest.raises(SandboxUnavailable, match="there is no bwrap on the path: install it"):
        sandbox.start()
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SandboxUnavailable, match="this process is root"):
        sandbox.start()
    assert LocalSandbox(SandboxConfig(isolation="auto"))._builders() == [""]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert LocalSandbox(SandboxConfig(isolation="auto"))._builders() == [str(program), ""]
    assert LocalSandbox(SandboxConfig(isolation="kernel"))._builders() == [""]
    with pytest.raises(SandboxUnavailable, match="programs cannot be isolated here"):
        sandbox.start()  # a bubblewrap that does nothing


@pytest.mark.skipif(
    shutil.which("bwrap") is None or os.geteuid() == 0, reason="needs bubblewrap, and not to be root"
)
def test_bubblewrap_builds_a_sandbox_with_every_property() -> None:
    sandbox = LocalSandbox(SandboxConfig(isolation="bubblewrap"))
    try:
        assert [one for one in sandbox.check() if not one.holds] == []
    finally:
        sandbox.close()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"python": "/no/python"}, "give the full path of a Python interpreter"),
        ({"read_only_paths": ("/no/such/folder",)}, "/no/such/folder does not exist"),
        ({"read_only_paths": (str(Path.home().parent),)}, "holds the (home|current) folder|not the root"),
        ({"read_only_paths": (str(REPO),)}, "holds the current folder"),
    ],
)
def test_view_that_shows_too_much_or_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], sentence: str
) -> None:
    monkeypatch.chdir(REPO)
    with pytest.raises(ValueError, match=sentence):
        LocalSandbox(SandboxConfig(**settings)).start()  # type: ignore[arg-type]
