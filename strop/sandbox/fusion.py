"""Programs on a SandboxFusion server: its HTTP call `POST /run_code`.

Isolation is up to that server. Protocol (github.com/bytedance/SandboxFusion, sandbox/server): the
request holds code, language, stdin, compile_timeout and run_timeout in seconds, memory_limit_MB, files and fetch_files
(contents in base64); the response holds status (Success, Failed, SandboxError), message, files, compile_result and
run_result, each with status (Finished, TimeLimitExceeded, Error), return_code, execution_time, stdout and stderr.

The whole answer has a deadline, from the connection to its last byte. Exit codes and signals are the program's own
choice and are passed on; only the server can say that a limit ended it.

The limits cpu_s, max_processes, max_open_files, file_mib and disk_mib have no counterpart there; output_kib is applied
to the answer.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from typing import Any

from strop.sandbox.config import Limits
from strop.sandbox.program import Program, SandboxOutcome, SandboxResult, failed
from strop.sandbox.remote import RemoteSandbox
from strop.utils.http_post import AnswerTooLargeError, post

_COMPILE_S = 30.0
_GRACE_S = 30.0
"""Time that the server may take beyond the program's limits, in seconds."""
_OK = 200


class FusionSandbox(RemoteSandbox):
    """Runs programs on a SandboxFusion server; use as `async with FusionSandbox(config) as sandbox:`."""

    def longest_s(self, limits: Limits) -> float:
        """As of RemoteSandbox, compilation included."""
        return limits.wall_s + _COMPILE_S + _GRACE_S

    def failure_sentence(self, reason: str) -> str:
        """As of RemoteSandbox."""
        return (
            f"the SandboxFusion server at {self.config.url} did not run a program: {reason}. Check "
            f"reward.sandbox.url and the server"
        )

    async def answer(self, program: Program, limits: Limits) -> SandboxResult:
        """As of RemoteSandbox."""
        body = json.dumps(_request(program, limits)).encode("utf-8")
        try:
            started = time.monotonic()
            answer = await self._post(body, limits)
            return _result(answer, program, limits, time.monotonic() - started)
        except AnswerTooLargeError:  # only the program's output can be so long
            return SandboxResult(outcome="output", is_truncated=True, error=_output_sentence(limits))
        except (OSError, ValueError) as error:
            return failed(f"the SandboxFusion server at {self.config.url} did not answer: {error}")

    async def _post(self, body: bytes, limits: Limits) -> Mapping[str, Any]:
        limit_s, address = self.longest_s(limits), f"{self.config.url.rstrip('/')}/run_code"
        try:
            reply = await post(address, body, {}, timeout_s=limit_s)
        except TimeoutError as error:
            raise TimeoutError(f"no whole answer within {limit_s:g} s") from error
        if reply.status != _OK:
            raise ValueError(f"HTTP {reply.status}")
        try:
            answer = json.loads(reply.body)
        except RecursionError as error:
            raise ValueError("the answer is nested too deeply") from error
        if not isinstance(answer, dict) or "status" not in answer:
            raise ValueError("the answer has no status; is this the address of a SandboxFusion server?")
        return answer


def _request(program: Program, limits: Limits) -> dict[str, Any]:
    if program.command:
        raise ValueError(
            "a SandboxFusion server runs code in a language, not a command; set code and language"
        )
    return {
        "code": program.code, "language": program.language,
        "stdin": program.stdin.decode("utf-8", errors="replace"),
        "compile_timeout": _COMPILE_S, "run_timeout": limits.wall_s, "memory_limit_MB": limits.memory_mib,
        "files": {name: base64.b64encode(data).decode("ascii") for name, data in program.files.items()},
        "fetch_files": list(program.fetch),
    }  # fmt: skip


def _result(answer: Mapping[str, Any], program: Program, limits: Limits, elapsed_s: float) -> SandboxResult:
    compile_stage, run_stage = (_stage(answer.get(name)) for name in ("compile_result", "run_result"))
    if answer["status"] == "SandboxError" or (not compile_stage and not run_stage):
        return failed(f"the SandboxFusion server failed: {str(answer.get('message', ''))[:300]}")
    stage = run_stage or compile_stage
    cap = limits.output_kib << 10
    stdout, stderr = (
        str(stage.get(name) or "").encode("utf-8", errors="replace") for name in ("stdout", "stderr")
    )
    is_truncated = len(stdout) > cap or len(stderr) > cap
    code = stage.get("return_code")
    outcome, sentence = _verdict(stage, code, stderr, limits, is_truncated=is_truncated)
    seconds = stage.get("execution_time")
    wall_s = float(seconds) if isinstance(seconds, float | int) and 0 <= seconds < 1e9 else 0.0
    files = answer.get("files")
    return SandboxResult(
        outcome=outcome, error=sentence,
        exit_code=code if isinstance(code, int) and code >= 0 else None,
        signal=-code if isinstance(code, int) and code < 0 else None,
        stdout=stdout[:cap], stderr=stderr[:cap], is_truncated=is_truncated,
        wall_s=wall_s, start_s=max(0.0, elapsed_s - wall_s),
        files={} if not isinstance(files, dict) else {
            str(name): base64.b64decode(str(data)) for name, data in files.items() if name in program.fetch
        },
    )  # fmt: skip


def _stage(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _verdict(
    stage: Mapping[str, Any], code: object, stderr: bytes, limits: Limits, *, is_truncated: bool
) -> tuple[SandboxOutcome, str]:
    if stage.get("status") == "TimeLimitExceeded":
        return "timeout", f"the program did not finish in {limits.wall_s:g} s (limits.wall_s)"
    if stage.get("status") == "Error":
        return "infrastructure", f"the SandboxFusion server failed: {stderr[:300].decode(errors='replace')}"
    if is_truncated:
        return "output", _output_sentence(limits)
    if code == 0:
        return "ok", ""
    if isinstance(code, int) and code < 0:
        return "killed", f"the program died with signal {-code}"
    return "error", f"the program exited with code {code}"


def _output_sentence(limits: Limits) -> str:
    return f"the program wrote more than {limits.output_kib} KiB (limits.output_kib)"
