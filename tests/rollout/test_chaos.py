"""Three engines in real processes, of which one after another is killed, stopped, cut off or made to lie."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rollout.replica_processes import ReplicaProcesses
from rollout_cases import answers, run, tokens

from strop.engines.causal_lm import CausalLM
from strop.rollout.client import NoEngine
from strop.rollout.replicas.client import RolloutClient
from strop.rollout.types import RolloutEngine, Sampling, TokenOutput
from strop.utils.rng import random_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

NUM_REQUESTS = 600
HARMS = ("kill", "stop", "half-open", "garbage")
SILENCE_S, PROBE_S, TIMEOUT_S = 0.5, 1.5, 30.0


def asks() -> list[tuple[list[int], Sampling]]:
    """Greedy and sampled requests of 20 to 49 tokens, by turns."""
    return [
        (
            tokens(3 + number % 9, number),
            Sampling(
                key=random_key(0, "chaos", number),
                temperature=float(number % 2),
                max_tokens=20 + number * 7 % 30,
            ),
        )
        for number in range(NUM_REQUESTS)
    ]


@pytest.fixture
def fleet(tiny_folder: Callable[[str], Path], tmp_path: Path) -> ReplicaProcesses:
    return ReplicaProcesses(tiny_folder("qwen3"), tmp_path)


def in_fleet(fleet: ReplicaProcesses, body: Callable[[], Awaitable[None]]) -> None:
    """Run the test, and end all processes."""

    async def whole() -> None:
        async with fleet:
            await body()

    run(whole(), seconds=150)


@dataclasses.dataclass
class Answered:
    """What one request gave."""

    output: TokenOutput | Exception
    heard: list[tuple[int, float, int]]


async def ask_all(client: RolloutClient) -> list[Answered]:
    async def one(number: int, prompt: list[int], sampling: Sampling) -> Answered:
        heard: list[tuple[int, float, int]] = []
        output: TokenOutput | Exception
        try:
            output = await client.generate(
                f"prompt-{number // 4}/{number % 4}#0",
                prompt,
                sampling,
                on_token=lambda *token: heard.append(token),
            )
        except Exception as error:  # noqa: BLE001  (the test looks at it)
            output = error
        return Answered(output, heard)

    return await asyncio.gather(*(one(number, *ask) for number, ask in enumerate(asks())))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_sample_is_lost_or_doubled(
    fleet: ReplicaProcesses, tiny: Callable[..., CausalLM], seed: int
) -> None:
    wanted = answers(tiny("qwen3", dtype="float32"), asks())
    luck = random.Random(seed)

    async def body() -> None:
        engines: list[RolloutEngine] = list(await asyncio.gather(*(fleet.start(n) for n in range(3))))
        client = RolloutClient(
            engines, timeout_s=TIMEOUT_S, restart=fleet.start, silence_s=SILENCE_S, probe_s=PROBE_S
        )

        async def chaos() -> None:
            for how in luck.sample(HARMS, len(HARMS)):
                await asyncio.sleep(luck.uniform(0.05, 0.5))
                serving = [one.index for one in client._router.serving if one.attempts]
                if serving:
                    fleet.harm(luck.choice(serving), how)

        harming = asyncio.create_task(chaos())
        started = time.monotonic()
        answered = await ask_all(client)
        assert time.monotonic() - started < TIMEOUT_S
        await harming
        for one, right in zip(answered, wanted, strict=True):
            assert isinstance(one.output, TokenOutput), one.output
            assert (one.output.token_ids, one.output.stop_reason) == (right.token_ids, right.stop_reason)
            assert one.output.log_probs == pytest.approx(right.log_probs, abs=1e-4)
            assert one.heard == list(
                zip(one.output.token_ids, one.output.log_probs, one.output.versions, strict=True)
            )
        counts = client.counts
        assert (counts.issued, counts.completed, counts.open) == (NUM_REQUESTS, NUM_REQUESTS, 0)
        assert counts.reissued > 0
        await client.close()

    in_fleet(fleet, body)


def test_when_all_are_lost_every_request_fails_soon_with_the_cause(fleet: ReplicaProcesses) -> None:
    async def body() -> None:
        engines: list[RolloutEngine] = list(await asyncio.gather(*(fleet.start(n) for n in range(3))))
        client = RolloutClient(engines, timeout_s=TIMEOUT_S, silence_s=SILENCE_S, probe_s=PROBE_S)

        async def chaos() -> None:
            await asyncio.sleep(0.2)
            for index, how in enumerate(HARMS[:3]):
                fleet.harm(index, how)

        harming = asyncio.create_task(chaos())
        started = time.monotonic()
        answered = await ask_all(client)
        assert time.monotonic() - started < TIMEOUT_S
        await harming
        failures = [one.output for one in answered if isinstance(one.output, Exception)]
        assert failures
        assert all(isinstance(error, NoEngine) for error in failures), failures
        for sentence in (
            r"engine 0: the rollout engine at 127.0.0.1:",
            "engine 1: it did not answer a probe within 1.5 s",
            "engine 2: it did not answer a probe within 1.5 s",
        ):
            assert sentence in str(failures[-1])
        counts = client.counts
        assert (counts.completed, counts.failed) == (NUM_REQUESTS - len(failures), len(failures))
        assert counts.open == 0

    in_fleet(fleet, body)


def test_a_replacement_with_old_weights_does_not_serve(fleet: ReplicaProcesses) -> None:
    async def body() -> None:
        engines: list[RolloutEngine] = list(await asyncio.gather(*(fleet.start(n) for n in range(2))))
        for engine in engines:
            await engine.set_version(1)  # the fleet would start version 0
        client = RolloutClient(
            engines, timeout_s=TIMEOUT_S, restart=fleet.start, silence_s=SILENCE_S, probe_s=PROBE_S
        )
        asked = asyncio.create_task(ask_all(client))
        await asyncio.sleep(0.2)
        fleet.harm(0, "kill")
        answered = await asked
        assert {version for one in answered for _, _, version in one.heard} == {1}
        assert client.counts.completed == NUM_REQUESTS

        refused = "it holds version 0, and version 1 is current"

        async def ask_on(name: str) -> None:
            while not client._router.replicas[0].cause.endswith(refused):
                await client.generate(name, [1, 2, 3], Sampling(key=0, max_tokens=40))

        # All may have been answered before it was started; one of these is open, so the client looks after it.
        async with asyncio.timeout(2 * TIMEOUT_S):
            await asyncio.gather(ask_on("one"), ask_on("another"))
        await client.close()

    in_fleet(fleet, body)
