"""The native engine with a copy of the weights of its own: it generates with verified weights only."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rollout_cases import answers, run, token_ids, tokens, turns

from strop.engines.causal_lm import CausalLM
from strop.engines.checksum.models import digest_weights
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling
from strop.rollout.weight_sync import sender, shared_memory
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.stream import Bucket
from strop.rollout.weight_sync.types import SyncError, SyncRefused, SyncReport, UnverifiedWeights
from strop.rollout.weight_sync.verified_engine import VerifiedEngine

PROMPT = tokens(9, seed=1)
SAMPLING = Sampling(key=5, max_tokens=12)


@dataclass
class Rollout:
    """A trained model, and an engine with a copy of it."""

    trained: CausalLM
    copy: CausalLM
    sender: WeightSender
    engine: VerifiedEngine

    async def sync(self, version: int, *, expected: int | None = None) -> SyncReport:
        """One sync, with the sender in a thread as in another process."""
        sending = asyncio.create_task(asyncio.to_thread(self.sender.send, version))
        received, _ = await asyncio.gather(
            self.engine.update_weights(expected if expected is not None else version),
            sending,
            return_exceptions=True,
        )
        if isinstance(received, BaseException):
            raise received
        return received

    async def generate(self, request_id: str = "one") -> tuple[int, ...]:
        return (await self.engine.generate(request_id, PROMPT, SAMPLING)).token_ids


@pytest.fixture
def rollout(
    tiny: Callable[..., CausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rollout]:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    trained, copy = tiny("qwen3", dtype="float32"), tiny("qwen3", dtype="float32")
    change(trained, 3)
    receiver = WeightReceiver(ModuleTarget(copy.module), timeout_s=10.0)
    sender = WeightSender(trained.module, bucket_bytes=4096, timeout_s=10.0)
    endpoint = sender.open(num_receivers=1)
    assert endpoint is not None
    receiver.join(endpoint, index=0)
    engine = VerifiedEngine(NativeEngine(copy, max_running=4), receiver)
    yield Rollout(trained, copy, sender, engine)
    receiver.close()
    sender.close()


def change(model: CausalLM, seed: int) -> None:
    """As an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def test_generation_is_refused_before_the_first_sync(rollout: Rollout) -> None:
    with pytest.raises(
        UnverifiedWeights,
        match=r"^request one is refused, the weights are not verified: no weights have arrived yet$",
    ):
        run(rollout.generate())
    with pytest.raises(UnverifiedWeights, match=r"^a health check is refused"):
        run(rollout.engine.health())


def test_after_each_sync_the_engine_samples_what_the_trained_model_samples(rollout: Rollout) -> None:
    async def scenario() -> None:
        for version in (1, 2):
            change(rollout.trained, version)
            report = await rollout.sync(version)
            assert (
                report.digest == digest_weights(rollout.copy.module) == digest_weights(rollout.trained.module)
            )
            output = await rollout.engine.generate("one", PROMPT, SAMPLING)
            assert output.versions == (version,) * len(output.token_ids)
            sampled.append(output.token_ids)
            expected.append(await asyncio.to_thread(plain))

    def plain() -> tuple[int, ...]:
        return token_ids(answers(rollout.trained, [(PROMPT, SAMPLING)]))[0]

    sampled: list[tuple[int, ...]] = []
    expected: list[tuple[int, ...]] = []
    run(scenario())
    assert sampled == expected
    assert sampled[0] != sampled[1], "the two versions must be told apart"


def test_prompts_computed_with_older_weights_are_forgotten(rollout: Rollout) -> None:
    async def scenario() -> tuple[float, float]:
        await rollout.sync(1)
        await rollout.generate()
        before = (await rollout.engine.health())["prefilled_tokens"]
        await rollout.sync(2)
        await rollout.generate()
        health = await rollout.engine.health()
        assert health["verified_version"] == 2.0
        return before, health["prefilled_tokens"]

    before, after = run(scenario())
    assert after - before >= len(PROMPT)


def test_a_failed_sync_refuses_generation_and_a_good_one_repairs_it(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce = sender._Session._announce

    def corrupt(session: sender._Session, bucket: Bucket) -> None:
        bucket.data[0] ^= 1  # in the shared memory
        announce(session, bucket)

    async def scenario() -> None:
        await rollout.sync(1)
        with monkeypatch.context() as patched:
            patched.setattr(sender._Session, "_announce", corrupt)
            with pytest.raises(SyncError, match="^sync 2 corrupted: "):
                await rollout.sync(2)
        with pytest.raises(UnverifiedWeights, match=r"^request one is refused, .*: sync 2 corrupted: "):
            await rollout.generate()
        with pytest.raises(UnverifiedWeights, match="^setting version 2 is refused"):
            await rollout.engine.set_version(2)
        await rollout.sync(3)
        assert await rollout.generate()
        await rollout.engine.set_version(3)
        with pytest.raises(ValueError, match="version 4 was set, but the rollout worker holds version 3"):
            await rollout.engine.set_version(4)

    run(scenario())


def test_requests_that_come_during_a_sync_wait_for_its_end(rollout: Rollout) -> None:
    async def scenario() -> None:
        await rollout.sync(1)
        updating = asyncio.create_task(rollout.engine.update_weights(2))
        sending = asyncio.create_task(asyncio.to_thread(slow_send))
        await asyncio.to_thread(begun.wait, 10.0)
        request = asyncio.create_task(rollout.generate())
        await turns(5)
        assert not request.done()
        assert (await rollout.engine.health())["paused"] == 1, "it lives, and is not taken for lost"
        go_on.set()
        await asyncio.gather(updating, sending)
        assert await request == await rollout.generate()

    def slow_send() -> None:
        names = [name for name in rollout.trained.module.state_dict() if name != "lm_head.weight"]
        rollout.sender.send(2, (pair for name in names for pair in held_back(name)))

    def held_back(name: str) -> Iterator[tuple[str, torch.Tensor]]:
        begun.set()
        assert go_on.wait(10.0)
        yield name, rollout.trained.module.state_dict()[name]

    begun, go_on = threading.Event(), threading.Event()
    run(scenario())


def test_a_request_that_runs_goes_on_with_the_new_weights(rollout: Rollout) -> None:
    async def scenario() -> None:
        await rollout.sync(1)
        long = dataclasses.replace(SAMPLING, max_tokens=20, stop_token_ids=())
        for is_paused in (False, True):
            request = asyncio.create_task(rollout.engine.generate("slow", PROMPT, long))
            await turns(6)
            if is_paused:
                await rollout.engine.pause()
            before = rollout.engine.version
            await rollout.sync(before + 1)
            if is_paused:
                await turns(5)
                assert not request.done(), "its owner has held it"
                await rollout.engine.resume()
            versions = (await request).versions
            assert list(versions) == sorted(versions)
            assert set(versions) == {before, before + 1}

    run(scenario())


def test_a_sync_does_not_begin_while_a_request_runs_that_could_not_go_on(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeEngine, "abilities", frozenset())

    async def scenario() -> None:
        await rollout.sync(1)
        request = asyncio.create_task(rollout.generate("slow"))
        await turns(3)
        with pytest.raises(SyncRefused, match="^sync 2 refused: it would overwrite the weights of 1 running"):
            await rollout.sync(2)
        assert await request == await rollout.generate()
        await rollout.sync(2)

    run(scenario())


def test_the_other_calls_reach_the_engine(rollout: Rollout) -> None:
    async def scenario() -> None:
        await rollout.sync(1)
        await rollout.engine.pause()
        request = asyncio.create_task(rollout.engine.generate("held", PROMPT, SAMPLING))
        await turns(3)
        assert not request.done()
        await rollout.engine.abort()
        assert (await request).stop_reason == "aborted"
        await rollout.engine.resume()
        await rollout.engine.sleep()
        assert await rollout.generate()

    run(scenario())
