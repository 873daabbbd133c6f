"""vLLM itself, on this machine's CPU: tokens, log-probs and weights against transformers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from program_path import python_path
from rollout.shared_host_device import HostDevice
from transformers import AutoModelForCausalLM

from strop.data.tiny_model import make_tiny_model
from strop.engines.config import ModelConfig
from strop.engines.model import weights_of_folder
from strop.rollout.types import Sampling, TokenOutput
from strop.rollout.vllm.config import VllmConfig
from strop.rollout.vllm.engine import VllmEngine, start_vllm
from strop.rollout.vllm.process import VllmDied
from strop.rollout.vllm.settings import Settings
from strop.rollout.weight_sync.probe import check_probe, probe_tokens
from strop.rollout.weight_sync.stream import parameter_stream
from strop.rollout.weight_sync.types import Probe, SyncCorrupted

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

T = TypeVar("T")
TOLERANCE = 1e-4
"""Largest difference of log-probs from transformers, both in float32; 1e-6 was seen."""
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
LONG = 1000
"""Tokens of a request that still runs when something is done to it, also on a busy machine."""


def make_model(folder: Path, *, seed: int) -> Any:
    """A Qwen3 model whose head is tied to its embedding; vLLM's attention on a CPU has no heads of 16."""
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    make_tiny_model(folder, seed=seed, intermediate_size=192, max_position_embeddings=2048, **sizes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.tie_word_embeddings
    return model


async def start(
    folder: Path, log: Path, *, unused: tuple[int, ...] = (), tensor_parallel: int = 1
) -> VllmEngine:
    settings = Settings(
        model=str(folder), dtype="float32", device="cpu", max_tokens=1100, max_running=16, num_threads=1,
        shares_device=True, log=log, unused_tokens=unused,
    )  # fmt: skip
    held = weights_of_folder(ModelConfig(path=str(folder)))
    config = VllmConfig(cpu_cache_gib=0.25, tensor_parallel=tensor_parallel)
    return await start_vllm(config, settings, held, version=0)


@dataclass
class Served:
    """An engine with the weights of the first model, and two models of transformers."""

    engine: VllmEngine
    models: list[Any]
    runner: asyncio.Runner

    def run(self, work: Coroutine[Any, Any, T], *, seconds: float = 120.0) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(seconds):
                return await work

        return self.runner.run(bounded())

    def write(self, which: int) -> None:
        for bucket in parameter_stream(self.models[which]):
            self.engine.target.load([(weight.name, tensor) for weight, tensor in bucket.tensors()])

    def update(self, which: int) -> None:
        self.write(which)
        self.run(self.engine.set_version(self.engine.version + 1))

    def generate(self, prompt: list[int] = PROMPT, *, name: str = "one", **options: Any) -> TokenOutput:
        sampling = Sampling(**{"key": 3, "max_tokens": 20, **options})
        return self.run(self.engine.generate(name, prompt, sampling))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vllm")
    models = [make_model(folder / str(seed), seed=seed) for seed in (0, 1)]
    with asyncio.Runner() as runner:
        engine = runner.run(start(folder / "0", folder / "vllm.log"))
        made = Served(engine, models, runner)
        made.update(0)
        yield made
        runner.run(engine.close())


@torch.no_grad()
def log_probs(model: Any, ids: list[int], *, temperature: float = 1.0) -> torch.Tensor:
    """Of all tokens but the first, by a full forward pass."""
    logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def difference(model: Any, output: TokenOutput, *, temperature: float = 1.0) -> float:
    expected = log_probs(model, [*PROMPT, *output.token_ids], temperature=temperature)[len(PROMPT) - 1 :]
    return float((torch.tensor(output.log_probs) - expected).abs().max())


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5, "temperature": 1.3}],
)
def test_log_probs_are_those_of_the_whole_distribution_at_the_temperature(
    served: Served, options: dict[str, Any]
) -> None:
    output = served.generate(**options)
    assert (len(output.token_ids), output.stop_reason) == (20, "length")
    assert set(output.versions) == {served.engine.version}
    assert difference(served.models[0], output, temperature=options.get("temperature") or 1.0) < TOLERANCE


def test_greedy_tokens_are_those_of_transformers(served: Served) -> None:
    expected = served.models[0].generate(
        torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=-1
    )
    assert served.generate(temperature=0.0).token_ids == tuple(expected[0, len(PROMPT) :].tolist())


def test_a_stop_token_is_the_last_one(served: Served) -> None:
    whole = served.generate().token_ids
    stop = whole[7]
    output = served.generate(stop_token_ids=(stop,))
    assert output.token_ids == whole[: whole.index(stop) + 1]
    assert output.stop_reason == "stop"


def test_tokens_depend_on_the_key_and_not_on_the_neighbours(served: Served) -> None:
    alone = served.generate(key=7).token_ids

    async def together() -> list[TokenOutput]:
        asks = [(PROMPT[: 3 + i % 5], Sampling(key=100 + i, max_tokens=5 + i)) for i in range(11)]
        asks.append((PROMPT, Sampling(key=7, max_tokens=20)))
        return await asyncio.gather(*(served.engine.generate(f"r{i}", *ask) for i, ask in enumerate(asks)))

    assert served.run(together())[-1].token_ids == alone
    assert served.generate(key=8).token_ids != alone
    assert served.generate(key=7, position=1).token_ids != alone


def test_samples_follow_the_distribution(served: Served) -> None:
    """Chi-square over the tokens expected at least five times, at 1 in 10,000."""
    count = 1500

    async def sample() -> list[int]:
        asks = (
            served.engine.generate(f"s{i}", PROMPT, Sampling(key=i, max_tokens=1, temperature=0.5))
            for i in range(count)
        )
        return [output.token_ids[0] for output in await asyncio.gather(*asks)]

    drawn = torch.bincount(torch.tensor(served.run(sample())), minlength=103)
    with torch.no_grad():
        probs = (served.models[0](torch.tensor([PROMPT])).logits[0, -1] / 0.5).softmax(-1)
    common = probs * count >= 5
    expected = torch.cat([probs[common], probs[~common].sum()[None]]) * count
    found = torch.cat([drawn[common], drawn[~common].sum()[None]])
    statistic = float(((found - expected) ** 2 / expected.clamp(min=1)).sum())
    free = len(expected) - 1
    assert statistic < free + 3.72 * (2 * free) ** 0.5 + 10, (statistic, free)


def test_an_abort_gives_the_tokens_so_far(served: Served) -> None:
    whole = served.generate(max_tokens=LONG).token_ids
    seen: list[int] = []

    async def abort() -> TokenOutput:
        enough = asyncio.Event()

        def on_token(token: int, log_prob: float, version: int) -> None:
            seen.append(token)
            if len(seen) >= 5:
                enough.set()

        task = asyncio.create_task(
            served.engine.generate("a", PROMPT, Sampling(key=3, max_tokens=LONG), on_token=on_token)
        )
        await enough.wait()
        await served.engine.abort(["a", "unknown"])
        return await task

    output = served.run(abort())
    assert output.stop_reason == "aborted"
    assert 5 <= len(output.token_ids) < LONG
    assert output.token_ids == tuple(seen) == whole[: len(seen)]


def test_an_abort_right_after_the_request_finds_it(served: Served) -> None:
    async def abort() -> TokenOutput:
        task = asyncio.create_task(served.engine.generate("b", PROMPT, Sampling(key=3, max_tokens=LONG)))
        await asyncio.sleep(0)
        await served.engine.abort()
        return await task

    assert served.run(abort()).stop_reason == "aborted"


def test_a_caller_that_is_cancelled_ends_its_request(served: Served) -> None:
    async def cancel() -> TokenOutput:
        task = asyncio.create_task(served.engine.generate("c", PROMPT, Sampling(key=3, max_tokens=LONG)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await served.engine.generate("c", PROMPT, Sampling(key=3, max_tokens=5))

    assert len(served.run(cancel()).token_ids) == 5


def test_a_pause_holds_requests_where_they_are(served: Served) -> None:
    whole = served.generate(max_tokens=LONG)
    seen: list[int] = []

    async def pause() -> tuple[int, int, TokenOutput]:
        task = asyncio.create_task(
            served.engine.generate(
                "p", PROMPT, Sampling(key=3, max_tokens=LONG), on_token=lambda token, *_: seen.append(token)
            )
        )
        while len(seen) < 5:
            await asyncio.sleep(0.005)
        await served.engine.pause()
        before = len(seen)
        assert (await served.engine.health())["paused"] == 1
        await asyncio.sleep(0.5)
        after = len(seen)
        await served.engine.resume()
        return before, after, await task

    before, after, output = served.run(pause())
    assert before == after < LONG
    assert output.token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        ([], {}, "0 prompt tokens"),
        ([5, 103], {}, "vocabulary has 103"),
        ([5, -1], {}, "vocabulary has 103"),
        (PROMPT, {"max_tokens": 1093}, "started for 1100 tokens"),
    ],
)
def test_what_vllm_cannot_serve_is_refused(
    served: Served, prompt: list[int], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        served.generate(prompt, **options)


def test_new_weights_are_used_at_once_tied_head_included(served: Served) -> None:
    served.generate(temperature=0.0)  # its prompt is kept, and must be forgotten
    served.update(1)
    try:
        output = served.generate(temperature=0.0)
        assert set(output.versions) == {served.engine.version}
        assert difference(served.models[1], output) < TOLERANCE
        assert difference(served.models[0], output) > 0.1
    finally:
        served.update(0)
    with pytest.raises(ValueError, match="versions only grow"):
        served.run(served.engine.set_version(served.engine.version - 1))


def test_requests_in_flight_go_on_with_new_weights(served: Served) -> None:
    old, seen = served.engine.version, []

    async def update() -> TokenOutput:
        task = asyncio.create_task(
            served.engine.generate(
                "u", PROMPT, Sampling(key=3, max_tokens=LONG), on_token=lambda token, *_: seen.append(token)
            )
        )
        while len(seen) < 5:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(served.write, 1)
        await served.engine.set_version(old + 1)
        return await task

    try:
        output = served.run(update())
        ids, change = [*PROMPT, *output.token_ids], output.versions.index(old + 1)
        assert list(output.versions) == [old] * change + [old + 1] * (LONG - change)
        assert change >= 5
        found = torch.tensor(output.log_probs)
        before, after = (log_probs(model, ids)[len(PROMPT) - 1 :] for model in served.models)
        assert (found - before)[:change].abs().max() < TOLERANCE
        assert (found - after)[change:].abs().max() < TOLERANCE
    finally:
        served.update(0)


def test_workers_without_a_device_say_so_and_get_their_weights_through_host_memory(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "strop.rollout.vllm.target"):
        patch.setattr(served.engine.target, "_device_of", HostDevice.of)
        served.update(1)
    try:
        assert len(caplog.messages) == 1
        assert caplog.messages[0].endswith("of the device: vLLM's worker: it computes on no CUDA device")
        assert difference(served.models[1], served.generate()) < TOLERANCE
    finally:
        served.update(0)


def test_a_tensor_that_arrives_damaged_is_named_and_the_next_update_heals(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("strop.rollout.weight_sync.bucket.digest_tensor", lambda tensor: 1)
        with pytest.raises(RuntimeError, match=r"embed_tokens.* arrived with digest"):
            served.write(1)
    served.update(1)
    try:
        assert difference(served.models[1], served.generate()) < TOLERANCE
    finally:
        served.update(0)


def test_a_probe_tells_an_engine_with_other_weights(served: Served) -> None:
    ids = probe_tokens(103)
    probes = [
        Probe(token_ids=ids, log_probs=tuple(log_probs(model, list(ids)).tolist())) for model in served.models
    ]
    found = served.run(served.engine.log_probs(ids))
    assert check_probe(probes[0], found, version=4, dtype="float32") < TOLERANCE
    with pytest.raises(SyncCorrupted, match="sync 4 corrupted: on a probe of 23 tokens"):
        check_probe(probes[1], found, version=4, dtype="float32")


def test_health_has_vllms_own_counts(served: Served) -> None:
    before = served.run(served.engine.health())
    served.generate([*PROMPT, 5], temperature=0.0)
    after = served.run(served.engine.health())
    grown = {name: after[name] - before[name] for name in after}
    assert grown["decoded_tokens"] == 20 + 1, "and that of the health check"
    assert grown["prefilled_tokens"] + grown["cached_tokens"] >= len(PROMPT) + 1
    assert (after["waiting"], after["running"], grown["preempted"]) == (0.0, 0.0, 0.0)
    assert 0.0 <= after["cache_share"] < 1.0


def test_sleep_on_a_cpu_keeps_the_weights_and_says_so(served: Served) -> None:
    before = served.generate().token_ids
    with pytest.raises(ValueError, match="on a CPU"):
        served.run(served.engine.sleep(2))
    served.run(served.engine.sleep(1))
    served.run(served.engine.wake_up())
    assert "frees_weights" not in served.engine.abilities
    assert served.generate().token_ids == before


def test_no_process_waits_in_a_loop_for_the_one_that_computes(served: Served) -> None:
    """For one device: vLLM's worker and its core would each take a processor from whoever asks them."""
    names = [one.name() for one in psutil.Process(served.engine.pid).children(recursive=True)]
    assert "VLLM::EngineCore" in names
    assert not [name for name in names if "Worker" in name]


def test_tokens_that_no_text_has_are_never_sampled(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", seed=0)
    unused = tuple(range(40, model.config.vocab_size))

    async def work() -> TokenOutput:
        engine = await start(tmp_path / "model", tmp_path / "vllm.log", unused=unused)
        try:
            for bucket in parameter_stream(model):
                engine.target.load([(weight.name, tensor) for weight, tensor in bucket.tensors()])
            await engine.set_version(1)
            return await engine.generate("one", PROMPT, Sampling(key=5, temperature=2.0, max_tokens=100))
        finally:
            await engine.close()

    output = asyncio.run(work())
    assert 30 < max(output.token_ids) < 40, "all others are likely"
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *output.token_ids]])).logits[0, len(PROMPT) - 1 : -1, :40] / 2
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=TOLERANCE, rtol=0)


def test_a_killed_process_is_noticed_and_leaves_nothing(tmp_path: Path) -> None:
    make_model(tmp_path / "model", seed=0)

    async def kill() -> list[psutil.Process]:
        engine = await start(tmp_path / "model", tmp_path / "vllm.log")
        server = psutil.Process(engine._process.pid)
        started = [server, *server.children(recursive=True)]
        assert len(started) > 1
        await engine.pause()
        task = asyncio.create_task(engine.generate("k", PROMPT, Sampling(key=3, max_tokens=LONG)))
        await asyncio.sleep(0.1)
        os.kill(server.pid, 9)
        with pytest.raises(VllmDied, match=r"exit code -9.*vllm\.log"):
            await task
        with pytest.raises(VllmDied):
            await engine.health()
        await engine.close()
        return started

    started = asyncio.run(kill())
    deadline = time.monotonic() + 20
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in started):
        assert time.monotonic() < deadline, "a process of vLLM goes on without its owner"
        time.sleep(0.2)


OWNER = """
import asyncio, sys
from pathlib import Path
from rollout.test_vllm_engine import start

async def main():
    await start(Path(sys.argv[1]), Path(sys.argv[2]))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["it starts", "it is idle"])
@pytest.mark.parametrize("with_server", [False, True])
def test_nothing_is_left_of_vllm_when_its_owner_is_killed(
    when: str, with_server: bool, tmp_path: Path
) -> None:
    """Also where the process that would end the others is killed with it."""
    make_model(tmp_path / "model", seed=0)
    owner = psutil.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "model"), str(tmp_path / "vllm.log")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[1])},
    )
    started: list[psutil.Process] = []
    try:
        if when == "it is idle":
            assert owner.stdout.readline() == b"ready\n"
        while (
            len(started := owner.children(recursive=True)) < 3
        ):  # the server, its core, and what counts semaphores
            assert owner.poll() is None, (tmp_path / "vllm.log").read_text()[-2000:]
            time.sleep(0.1)
        (server,) = owner.children()
        owner.kill()
        if with_server:
            server.kill()
        owner.wait(20)
        deadline = time.monotonic() + 60  # a process that is importing looks for its parent when it has
        while left := [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:
            assert time.monotonic() < deadline, f"{left} go on"
            time.sleep(0.2)
    finally:
        for one in [owner, *started]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def test_an_engine_over_two_devices_generates_as_the_model_does_and_takes_its_weights(tmp_path: Path) -> None:
    """Two processes of vLLM share each matrix; a CPU stands for two devices."""
    models = [make_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    with asyncio.Runner() as runner:
        engine = runner.run(start(tmp_path / "0", tmp_path / "vllm.log", tensor_parallel=2))
        try:
            served = Served(engine, models, runner)
            for which in (0, 1, 0):
                served.update(which)
                output = served.generate(name=f"with {which}")
                assert difference(models[which], output) < TOLERANCE
                assert difference(models[1 - which], output) > 100 * TOLERANCE
        finally:
            runner.run(engine.close())
