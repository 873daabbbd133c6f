"""Judges and reward servers that answer as no server should, over real connections of this machine."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable

import pytest
from hostile_http import Line, hostile
from judge_cases import completion
from reward_cases import score_all

from strop.rewards import RewardConfig
from strop.rewards.config import OnFailureConfig
from strop.rewards.judges.config import JudgeConfig, ServerConfig
from strop.utils.http_post import post

pytestmark = pytest.mark.timeout(60)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
GOOD = json.dumps(completion('{"score": 1}')).encode()


def _chunks(line: Line) -> None:
    line.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    line.endless(b"10000\r\n" + b" " * 0x10000 + b"\r\n")


def _redirect(line: Line) -> None:
    line.send(b"HTTP/1.1 307 Away\r\nLocation: http://127.0.0.2:9/elsewhere\r\nContent-Length: 0\r\n\r\n")


def _bomb(line: Line) -> None:
    body = gzip.compress(b" " * (40 << 20), compresslevel=1)
    line.send(HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def says(data: bytes, *, drips: bytes = b"", endless: bytes = b"") -> Callable[[Line], None]:
    """Sends at once, and then for as long as somebody listens."""

    def answer(line: Line) -> None:
        line.send(data)
        if drips:
            line.drip(drips)
        if endless:
            line.endless(endless)

    return answer


OUT_OF_TIME = ("timeout", "did not answer in 0.3 s")
LARGE, NOT_HTTP = ("infrastructure", "more than 16 MiB came back"), ("infrastructure", "could not be asked")
NO_JSON = ("infrastructure", "sent no JSON")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
ATTACKS: dict[str, tuple[Callable[[Line], None], tuple[str, str]]] = {
    "hangs up": (says(b""), NOT_HTTP),
    "drips its status": (says(b"", drips=HEAD * 1000), OUT_OF_TIME),
    "drips its body": (says(HEAD + b"\r\n", drips=b" " * 9000), OUT_OF_TIME),
    "endless body": (says(HEAD + b"\r\n", endless=b" " * 65536), LARGE),
    "endless chunks": (_chunks, LARGE),
    "endless headers": (says(HEAD, endless=b"X: y\r\n"), ("infrastructure", "Too many headers")),
    "a long header": (says(HEAD + b"X: ", endless=b"y" * 65536), ("infrastructure", "more than 8190 bytes")),
    "endless continues": (says(b"", endless=CONTINUE), OUT_OF_TIME),
    "redirect": (_redirect, ("infrastructure", "refused with HTTP status 307")),
    "gzip bomb": (_bomb, NO_JSON),
    "a page": (says(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>"), NO_JSON),
    "another protocol": (says(b"SSH-2.0-OpenSSH_9.9\r\n"), NOT_HTTP),
    "deep JSON": (says(HEAD + b"\r\n" + b"[" * 200_000), NO_JSON),
    "half an answer": (
        says(HEAD + b"Content-Length: 900\r\n\r\n" + GOOD),
        ("infrastructure", "was cut after"),
    ),
    "a strange length": (
        says(HEAD + b"Content-Length: -7\r\n\r\n" + GOOD),
        ("infrastructure", "Invalid character in Content-Length"),
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_judge_that_misbehaves_is_an_outcome_within_its_deadline(attack: str) -> None:
    answer, (kind, sentence) = ATTACKS[attack]
    slow = sentence.startswith("did not answer")
    with hostile(answer) as (url, asked):
        config = JudgeConfig(base_url=f"{url}/v1", model="m", timeout_s=0.3 if slow else 20.0, retries=0)
        policies = OnFailureConfig(infrastructure="exclude")
        (outcome,) = score_all(RewardConfig(judge=config, on_failure=policies), ["2"])
    assert (outcome.kind, sentence in outcome.error) == (kind, True), outcome
    assert len(outcome.error) < 400
    assert len(asked) == 1
    for thread in threading.enumerate():
        if thread.name.startswith("calls-judge"):
            thread.join(20)
            assert not thread.is_alive(), "nothing waits for it any more"


@pytest.mark.parametrize("attack", ["drips its body", "endless body", "redirect", "gzip bomb"])
def test_a_reward_server_that_misbehaves_is_an_outcome_too(attack: str) -> None:
    answer, (kind, sentence) = ATTACKS[attack]
    with hostile(answer) as (url, _):
        config = ServerConfig(url=f"{url}/score", timeout_s=0.3 if kind == "timeout" else 20.0, retries=0)
        policies = OnFailureConfig(infrastructure="exclude")
        (outcome,) = score_all(RewardConfig(server=config, on_failure=policies), ["2"])
    assert (outcome.kind, sentence in outcome.error) == (kind, True), outcome


def test_a_handshake_that_never_ends_is_ended_as_well() -> None:
    slow = hostile(lambda line: line.drip(b"\x16\x03\x03\x3f\xff" + b"\x02" * 9000), reads=False)
    with slow as (url, _), pytest.raises(TimeoutError):
        asyncio.run(post(url.replace("http:", "https:") + "/v1", b"{}", {}, timeout_s=0.3))
