"""A gateway over a small engine, as tests of it need it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import openai

from strop.agents.openai_server.chat_model import ChatModel
from strop.agents.openai_server.server import Gateway
from strop.agents.openai_server.session import Session
from strop.agents.openai_server.token_source import EngineSampler
from strop.agents.tools.templates import ChatTemplate
from strop.data.tiny_model import make_tiny_tokenizer
from strop.rollout.types import OnToken, RolloutEngine, Sampling, TokenOutput

T = TypeVar("T")


class ScriptedEngine:
    """Says the given texts, one after another, and remembers every token that it said."""

    def __init__(self, tokenizer: Any, answers: Sequence[str | Sequence[int]]) -> None:
        self._tokenizer, self._answers = tokenizer, list(answers)
        self.prompts: list[tuple[int, ...]] = []
        self.outputs: list[TokenOutput] = []
        self.samplings: list[Sampling] = []
        self.aborted: set[str] = set()
        self.num_cancelled = 0
        self.hangs = False

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        number = len(self.prompts)
        self.prompts.append(tuple(prompt_ids))
        self.samplings.append(sampling)
        answer = self._answers[number % len(self._answers)]
        ids = list(answer) if not isinstance(answer, str) else self.encode(answer)
        said: list[tuple[int, float, int]] = []
        try:
            for place, token in enumerate(ids[: sampling.max_tokens]):
                await asyncio.sleep(0.001 if self.hangs else 0)
                if request_id in self.aborted:
                    break
                said.append((token, -0.01 * (number + 1) - 0.001 * place, number))
                if on_token is not None:
                    on_token(*said[-1])
            while self.hangs and request_id not in self.aborted:
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        reason: Any = "stop" if said and said[-1][0] in sampling.stop_token_ids else "length"
        reason = "aborted" if request_id in self.aborted else reason
        columns = [tuple(one[column] for one in said) for column in range(3)]
        output = TokenOutput(
            token_ids=columns[0], log_probs=columns[1], versions=columns[2], stop_reason=reason
        )
        self.outputs.append(output)
        return output

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.aborted |= set(request_ids or ())

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass
class Open:
    """A gateway that serves."""

    address: str
    token: str
    sessions: dict[str, Session]

    def client(self, session: str = "one", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.address}/s/{session}/v1",
            api_key=self.token,
            max_retries=0,
            timeout=20,
            **options,
        )


class OpenSessions:
    """Every name is a session of one engine."""

    def __init__(self, model: ChatModel, sampler: Any) -> None:
        self.model, self.sampler = model, sampler
        self.sessions: dict[str, Session] = {}

    def find(self, name: str) -> tuple[Session, Any]:
        return self.sessions.setdefault(name, Session(self.model, uid=name)), self.sampler

    def remove(self, name: str) -> None:
        self.sessions.pop(name, None)


@asynccontextmanager
async def gateway(
    engine: RolloutEngine | ScriptedEngine, tokenizer: Any, *, tool_format: str = "auto", **options: Any
) -> AsyncIterator[Open]:
    limits = {"max_positions": 100_000, "timeout_s": 20.0} | options
    sampling = Sampling(key=0, max_tokens=200, stop_token_ids=(tokenizer.eos_token_id,))
    engine_: Any = engine
    sampler = EngineSampler(engine=engine_, sampling=sampling, **limits)
    stops = (tokenizer.eos_token_id,)
    model = ChatModel("tiny", tokenizer, ChatTemplate(tokenizer), stops, tool_format=tool_format)
    sessions = OpenSessions(model, sampler)
    made = Gateway(sessions)
    async with made.serving() as address:
        yield Open(address, made.token, sessions.sessions)


def served(
    engine: Any, work: Callable[[Open], T], *, tokenizer: Any = None, seconds: float = 60, **options: Any
) -> tuple[T, dict[str, Session]]:
    """What a blocking function returns that calls a gateway over this engine, and the sessions it made."""

    async def whole() -> tuple[T, dict[str, Session]]:
        async with asyncio.timeout(seconds), gateway(engine, tokenizer or TOKENIZER, **options) as opened:
            return await asyncio.to_thread(work, opened), opened.sessions

    return asyncio.run(whole())


TOKENIZER = make_tiny_tokenizer()
