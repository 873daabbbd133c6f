"""The server: its key, its limits, its sessions, and clients that go away."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from gateway_cases import TOKENIZER, Open, ScriptedEngine, served

from strop.agents.openai_server import server
from strop.agents.openai_server.session import Session

pytestmark = pytest.mark.timeout(60)

QUESTION: Any = {"role": "user", "content": "How much?"}
CHAT = {"model": "any", "messages": [QUESTION]}


def engine() -> ScriptedEngine:
    return ScriptedEngine(TOKENIZER, ["3<|im_end|>"])


def ask(
    opened: Open, path: str, *, key: str | None = None, body: Any = None, method: str = "", **headers: str
) -> tuple[int, Any]:
    """Status and JSON of one request."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    wanted = urllib.request.Request(
        opened.address + path,
        data=data,
        headers={"Authorization": f"Bearer {key or opened.token}", **headers},
        method=method or ("GET" if body is None else "POST"),
    )
    try:
        with urllib.request.urlopen(wanted, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.loads(refused.read())


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_only_the_key_opens_anything() -> None:
    def work(opened: Open) -> None:
        assert opened.address.startswith("http://127.0.0.1:")
        for path in ("/v1/models", "/s/one/v1/models", "/s/one/trajectories", "/nothing"):
            status, body = ask(opened, path, key="guess")
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert ask(opened, "/v1/models", Authorization="Basic x")[0] == 401
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{opened.address}/v1", api_key="guess").models.list()
        (card,) = opened.client().models.list()
        assert opened.client().models.retrieve(card.id).owned_by == "strop"
        with pytest.raises(openai.NotFoundError):
            opened.client().models.retrieve("other")

    served(engine(), work)


def test_a_session_is_named_by_key_address_or_header_in_one_way() -> None:
    def work(opened: Open) -> None:
        chat = "/v1/chat/completions"
        assert ask(opened, chat, key=f"{opened.token}:by-key", body=CHAT)[0] == 200
        assert ask(opened, f"/s/by-path{chat}", body=CHAT)[0] == 200
        assert ask(opened, chat, body=CHAT, **{"X-Strop-Session": "by-header"})[0] == 200
        assert ask(opened, f"/s/same{chat}", key=f"{opened.token}:same", body=CHAT)[0] == 200
        assert ask(opened, chat, body=CHAT)[0] == 200
        status, body = ask(opened, f"/s/one{chat}", key=f"{opened.token}:other", body=CHAT)
        assert (status, body["error"]["param"]) == (400, "session")
        assert ask(opened, f"/s/a%20b{chat}", body=CHAT)[0] == 400

    _, sessions = served(engine(), work)
    assert set(sessions) == {"by-key", "by-path", "by-header", "same", "default"}
    assert all(session.num_sequences == 1 for session in sessions.values())


def test_a_session_takes_a_reward_shows_its_trajectories_and_is_deleted() -> None:
    def work(opened: Open) -> None:
        opened.client().chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert ask(opened, "/s/one/reward", body={"reward": 0.5, "parts": {"acc": True}})[0] == 200
        status, body = ask(opened, "/s/one/reward", body={"reward": "much"})
        assert (status, body["error"]["param"]) == (400, "reward")
        _, found = ask(opened, "/s/one/trajectories")
        (made,) = found["trajectories"]
        assert (found["reward"], found["calls"]) == (0.5, 1)
        assert made["response_ids"] == [*TOKENIZER("3<|im_end|>")["input_ids"]]
        assert made["sampled"] == [True, True]
        assert made["log_probs"] == [-0.01, -0.011]
        assert ask(opened, "/s/one", method="DELETE")[0] == 200
        assert ask(opened, "/s/one/trajectories")[1]["trajectories"] == []

    served(engine(), work)


def test_what_is_no_request_is_answered_in_the_form_of_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 2000)

    def work(opened: Open) -> None:
        chat = "/v1/chat/completions"
        for body, status in [
            (b"{", 400),
            (b"[" * 1500, 400),
            (b"[]", 400),
            (b"\xff", 400),
            (b" " * 2001, 413),
        ]:
            found, said = ask(opened, chat, body=body)
            assert found == status, body[:10]
            assert said["error"]["type"] == "invalid_request_error"
        assert ask(opened, "/v2/nothing", body=CHAT)[0] == 404
        assert ask(opened, chat)[0] == 405

    served(engine(), work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(stream: bool) -> None:
    slow = engine()
    slow.hangs = True

    def work(opened: Open) -> None:
        client = opened.client().with_options(timeout=0.2)
        with pytest.raises(openai.APITimeoutError):
            list(client.chat.completions.create(**CHAT, stream=stream))  # type: ignore[call-overload]
        until(lambda: slow.num_cancelled == 1)

    _, sessions = served(slow, work)
    assert sessions["one"].sequences() == ()


def test_an_answer_that_takes_too_long_is_a_gateway_timeout() -> None:
    slow = engine()
    slow.hangs = True

    def work(opened: Open) -> str:
        with pytest.raises(openai.InternalServerError) as late:
            opened.client().chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert late.value.status_code == 504
        return late.value.message

    message, _ = served(slow, work, timeout_s=0.1)
    assert "longer than 0.1 s" in message
    assert slow.num_cancelled == 1


def test_one_call_too_many_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CALLS", 1)
    slow = engine()
    slow.hangs = True

    def work(opened: Open) -> None:
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(ask, opened, "/v1/chat/completions", body=CHAT)
            until(lambda: len(slow.prompts) == 1)
            assert ask(opened, "/v1/chat/completions", body=CHAT)[0] == 429
            slow.hangs = False
            assert first.result()[0] == 200

    served(slow, work)


def test_sessions_of_many_clients_at_once_stay_apart() -> None:
    many = ScriptedEngine(TOKENIZER, ["3<|im_end|>"])

    def work(opened: Open) -> None:
        start = threading.Barrier(8)

        def talk(number: int) -> None:
            client, messages = opened.client(f"n{number}"), [{"role": "user", "content": f"I am {number}"}]
            start.wait(10)
            for _ in range(3):
                made = client.chat.completions.create(model="any", messages=messages)  # type: ignore[arg-type]
                messages += [{"role": "assistant", "content": str(made.choices[0].message.content)}]
                messages += [{"role": "user", "content": "Go on"}]

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(talk, range(8)))

    _, sessions = served(many, work)
    for number in range(8):
        (trajectory,) = sessions[f"n{number}"].sequences()
        assert f"I am {number}<" in TOKENIZER.decode(trajectory.prompt_ids)
        assert sum(trajectory.sampled) == 6


def test_a_session_with_a_limit_forgets_its_oldest_sequences() -> None:
    def work(opened: Open) -> Session:
        session, _ = opened.sessions["one"], opened.client("one").models.list()
        for number in range(4):
            opened.client().completions.create(model="any", prompt=f"number {number}")
        return session

    def limited(opened: Open) -> Session:
        opened.client().models.list()
        opened.sessions["one"]._max_tokens = 25  # strop serve gives it
        return work(opened)

    session, _ = served(engine(), limited)
    assert (session.num_sequences, session.num_forgotten) == (2, 2)
    assert sum(len(one.token_ids) for one in session.sequences()) <= 25
    assert "number 3" in TOKENIZER.decode(session.sequences()[-1].prompt_ids)
