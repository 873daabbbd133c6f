"""SandboxFusion over HTTP, against a server of this test; e2b through a stand-in for its package."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading
import time
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from http_server import LocalServer

from strop.sandbox import Limits, Program, SandboxConfig, SandboxResult, SandboxUnavailable, fusion
from strop.sandbox.fusion import FusionSandbox
from strop.sandbox.hosted import HostedSandbox
from strop.utils import http_post

# What SandboxFusion writes, by the first line of the code; field names of its sandbox_api.py.
RUN = {"status": "Finished", "execution_time": 0.25, "return_code": 0, "stdout": "", "stderr": ""}
ANSWERS: dict[str, dict[str, Any]] = {
    "print('sandbox ready')": {"status": "Success", "message": "", "run_result": {**RUN, "stdout": "sandbox ready\n"}},
    "# fails": {"status": "Failed", "message": "", "run_result": {**RUN, "return_code": 3, "stderr": "no\n"}},
    "# hangs": {
        "status": "Failed", "message": "", "run_result": {**RUN, "status": "TimeLimitExceeded", "return_code": None},
    },
    "# dies": {"status": "Failed", "message": "", "run_result": {**RUN, "return_code": -11}},
    "# memory": {
        "status": "Failed", "message": "", "run_result": {**RUN, "return_code": 1, "stderr": "x\nMemoryError\n"},
    },
    "# loud": {"status": "Success", "message": "", "run_result": {**RUN, "stdout": "y" * 5000}},
    "# no compile": {
        "status": "Failed", "message": "",
        "compile_result": {**RUN, "return_code": 1, "stderr": "expected ;"}, "run_result": None,
    },
    "# server": {"status": "SandboxError", "message": "no worker", "run_result": None},
    "# other": {"detail": "not found"},
    "# file": {
        "status": "Success", "message": "", "run_result": RUN, "files": {"a.txt": base64.b64encode(b"made").decode()},
    },
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    requests: list[dict[str, Any]] = []  # noqa: RUF012
    busy, most_busy = 0, 0
    drips = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code"
        type(self).requests.append(body)
        first = body["code"].splitlines()[0]
        if first == "# slow":
            type(self).busy += 1
            type(self).most_busy = max(type(self).most_busy, self.busy)
            time.sleep(0.05)
            type(self).busy -= 1
            first = "# file"
        if first == "# drip":
            self.send_response(200)
            self.end_headers()
            type(self).drips = 0
            while self.drips < 400:
                type(self).drips += 1
                self.wfile.write(b" ")
                time.sleep(0.05)
        status = 500 if first == "# broken" else 200
        text = b"<html>" if first == "# text" else json.dumps(ANSWERS.get(first, {})).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = LocalServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(url: str, code: str, **fields: Any) -> SandboxResult:
    async def one() -> SandboxResult:
        config = SandboxConfig(
            backend="sandbox_fusion", url=url, limits=Limits(output_kib=2, wall_s=3.0, memory_mib=77)
        )
        async with FusionSandbox(config) as sandbox:
            return await sandbox.run(Program(code=code, **fields))

    return asyncio.run(one())


def test_request_has_the_fields_of_the_protocol(url: str) -> None:
    result = ask(url, "# file", language="cpp", stdin=b"in", files={"d/x": b"\xff"}, fetch=("a.txt",))
    assert Handler.requests[-1] == {
        "code": "# file", "language": "cpp", "stdin": "in", "compile_timeout": 30.0, "run_timeout": 3.0,
        "memory_limit_MB": 77, "files": {"d/x": "/w=="}, "fetch_files": ["a.txt"],
    }  # fmt: skip
    assert (result.outcome, result.exit_code, result.wall_s, result.files) == (
        "ok",
        0,
        0.25,
        {"a.txt": b"made"},
    )


@pytest.mark.parametrize(
    ("code", "outcome", "sentence"),
    [
        ("# fails", "error", "the program exited with code 3"),
        ("# hangs", "timeout", "did not finish in 3 s (limits.wall_s)"),
        ("# dies", "killed", "died with signal 11"),
        ("# memory", "error", "exited with code 1"),  # the program's own words: the server names no limit
        ("# loud", "output", "more than 2 KiB"),
        ("# no compile", "error", "exited with code 1"),
        ("# server", "infrastructure", "no worker"),
        ("# other", "infrastructure", "is this the address of a SandboxFusion server?"),
        ("# broken", "infrastructure", "500"),
        ("# text", "infrastructure", "did not answer"),
    ],
)
def test_each_answer_of_the_server_has_its_outcome(url: str, code: str, outcome: str, sentence: str) -> None:
    result = ask(url, code)
    assert result.outcome == outcome
    assert sentence in result.error
    assert len(result.stdout) <= 2048


def test_server_that_sends_one_byte_now_and_then_has_a_deadline(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "_COMPILE_S", 0.1)
    monkeypatch.setattr(fusion, "_GRACE_S", 0.1)
    sandbox = FusionSandbox(SandboxConfig(backend="sandbox_fusion", url=url))
    result = sandbox.run_blocking(Program(code="# drip", limits=Limits(wall_s=0.2)))
    assert (result.outcome, Handler.drips < 400) == ("infrastructure", True)
    assert "no whole answer within 0.4 s" in result.error


def test_output_longer_than_an_answer_may_be_is_the_programs_doing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_post, "MAX_ANSWER_BYTES", 1 << 12)
    result = ask(url, "# loud")
    assert (result.outcome, "(limits.output_kib)" in result.error) == ("output", True)


def test_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(
        SandboxUnavailable,
        match=r"server at http://127.0.0.1:9 did not run a program.*Check reward.sandbox.url",
    ):
        ask("http://127.0.0.1:9", "1")


def test_no_more_programs_at_the_server_than_places(url: str) -> None:
    async def many() -> list[SandboxResult]:
        async with FusionSandbox(
            SandboxConfig(backend="sandbox_fusion", url=url, max_concurrent=2, num_warm=1)
        ) as sandbox:
            return await asyncio.gather(*(sandbox.run(Program(code="# slow")) for _ in range(8)))

    assert [result.outcome for result in asyncio.run(many())] == ["ok"] * 8
    assert 1 <= Handler.most_busy <= 2


def test_commands_are_refused_by_a_server(url: str) -> None:
    sandbox = FusionSandbox(SandboxConfig(backend="sandbox_fusion", url=url))
    with pytest.raises(ValueError, match="runs code in a language, not a command"):
        sandbox.run_blocking(Program(command=("ls",)))


# --- e2b ---


class CommandExitException(Exception):
    def __init__(self, exit_code: int, stdout: str, stderr: str) -> None:
        super().__init__(exit_code)
        self.exit_code, self.stdout, self.stderr = exit_code, stdout, stderr


class TimeoutException(Exception):
    pass


class Machine:
    """The calls of e2b's AsyncSandbox that the adapter uses."""

    alive = 0

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.files = types.SimpleNamespace(write=self._write, read=self._read, exists=self._exists)
        self.commands = types.SimpleNamespace(run=self._run)

    @classmethod
    async def create(cls, timeout: int) -> Machine:
        cls.alive += 1
        return cls()

    async def _write(self, path: str, data: bytes) -> None:
        self.content[path] = data

    async def _read(self, path: str, format: str) -> bytearray:  # noqa: A002
        return bytearray(self.content[path])

    async def _exists(self, path: str) -> bool:
        return path in self.content

    async def _run(self, line: str, cwd: str, timeout: float) -> types.SimpleNamespace:
        assert line == "python3 -B __program__.py < __stdin__"
        code = self.content[f"{cwd}/__program__.py"].decode()
        if code == "hang":
            raise TimeoutException
        if code == "fail":
            raise CommandExitException(4, "out", "err")
        if code == "outage":
            raise OSError("no route")
        return types.SimpleNamespace(exit_code=0, stdout="sandbox ready\n", stderr="")

    async def kill(self) -> None:
        type(self).alive -= 1


def test_hosted_programs_have_outcomes_and_their_machines_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = types.ModuleType("e2b")
    stand_in.AsyncSandbox = Machine  # type: ignore[attr-defined]
    stand_in.CommandExitException = CommandExitException  # type: ignore[attr-defined]
    stand_in.TimeoutException = TimeoutException  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "e2b", stand_in)

    async def run_all() -> list[SandboxResult]:
        async with HostedSandbox(SandboxConfig(backend="e2b")) as sandbox:
            programs = [
                Program(code=code, fetch=("__stdin__", "no")) for code in ("fine", "fail", "hang", "outage")
            ]
            return [await sandbox.run(program) for program in programs]

    fine, fail, hang, outage = asyncio.run(run_all())
    assert (fine.outcome, fine.text, fine.files) == ("ok", "sandbox ready\n", {"__stdin__": b""})
    assert (fail.outcome, fail.exit_code, fail.stdout, fail.stderr) == ("error", 4, b"out", b"err")
    assert hang.outcome == "timeout"
    assert (outage.outcome, outage.error) == ("infrastructure", "e2b failed: OSError: no route")
    assert Machine.alive == 0


def test_missing_package_of_the_hosted_service_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(SandboxUnavailable, match=r"pip install 'strop\[e2b\]'"):
        HostedSandbox(SandboxConfig(backend="e2b"))
