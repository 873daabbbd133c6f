"""Images and videos through vLLM itself, on this machine's CPU: token ids and log-probs against transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import transformers

from references.tiny_vision import GREEN, IMAGE, RED, picture, png, save_tiny_vision
from references.token_passes import log_probs_of
from references.vision_prompts import WIDE, asked, generated_by_transformers, prompts_from, prompts_of
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, ModelConfig
from strop.engines.model import load_model, weights_of_folder
from strop.engines.multimodal.inputs import media_reader
from strop.engines.packing import make_rows
from strop.engines.tokenizer import load_tokenizer
from strop.engines.training import Engine
from strop.protocol.trajectory import MediaTokens, Prompt, Trajectory, media_of
from strop.rollout.types import Sampling, TokenOutput
from strop.rollout.vllm.config import VllmConfig
from strop.rollout.vllm.engine import VllmEngine, start_vllm
from strop.rollout.vllm.settings import Settings
from strop.rollout.weight_sync.probe import check_probe, probe_of
from strop.rollout.weight_sync.stream import parameter_stream

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

T = TypeVar("T")
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TOLERANCE = 1e-4
LONG = 400
GREENS = picture(24, 17, GREEN)


async def start(path: Path, log: Path) -> VllmEngine:
    shape = transformers.AutoConfig.from_pretrained(path)
    settings = Settings(
        model=str(path), dtype="float32", device="cpu", max_tokens=500, max_running=16, num_threads=1,
        shares_device=True, log=log, reader=media_reader(shape, str(path)), architecture=shape.architectures[0],
    )  # fmt: skip
    held = weights_of_folder(ModelConfig(path=str(path)))
    return await start_vllm(VllmConfig(cpu_cache_gib=0.25), settings, held, version=0)


@dataclass
class Served:
    """An engine with the weights of the first model, and two models of the trainer."""

    engine: VllmEngine
    path: Path
    models: list[CausalLM]
    runner: asyncio.Runner

    def run(self, work: Coroutine[Any, Any, T], *, seconds: float = 120.0) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(seconds):
                return await work

        return self.runner.run(bounded())

    async def begun(self, request_id: str, token_ids: Any, how: Sampling) -> asyncio.Task[TokenOutput]:
        """A request that has some of its tokens."""
        seen: list[int] = []
        work = self.engine.generate(request_id, token_ids, how, on_token=lambda token, *_: seen.append(token))
        task = asyncio.create_task(work)
        while len(seen) < 5 and not task.done():
            await asyncio.sleep(0.005)
        return task

    def write(self, which: int) -> None:
        for bucket in parameter_stream(self.models[which].module):
            self.engine.target.load([(weight.name, tensor) for weight, tensor in bucket.tensors()])

    def update(self, which: int) -> None:
        self.write(which)
        self.run(self.engine.set_version(self.engine.version + 1))

    def ask(self, asks: Sequence[tuple[Any, Sampling]]) -> list[TokenOutput]:
        async def together() -> list[TokenOutput]:
            return await asyncio.gather(
                *(self.engine.generate(f"r{n}", *one) for n, one in enumerate(asks)), return_exceptions=False
            )

        return self.run(together())

    def number(self, name: str) -> float:
        return self.run(self.engine.health())[name]

    def difference(self, which: int, token_ids: Any, output: TokenOutput, **options: Any) -> float:
        """Largest difference of log-probs from a full forward pass of a model of the trainer."""
        return float(
            (torch.tensor(output.log_probs) - self.log_probs(which, token_ids, output, **options)).abs().max()
        )

    def log_probs(
        self, which: int, token_ids: Any, output: TokenOutput, temperature: float = 1.0
    ) -> torch.Tensor:
        rows = make_rows([torch.tensor(token_ids)], [torch.tensor(output.token_ids)], [media_of(token_ids)])
        found, _ = log_probs_of(self.models[which], rows, temperature=temperature, max_tokens=600)
        return found


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("vllm")
    paths = [save_tiny_vision(request.param, folder / str(n), seed=n, head_dim=32) for n in (0, 1)]
    models = [load_model(ModelConfig(path=str(path)), device="cpu") for path in paths]
    with asyncio.Runner() as runner:
        engine = runner.run(start(paths[0], folder / "vllm.log"))
        made = Served(engine, paths[0], models, runner)
        try:
            made.update(0)
            yield made
        finally:
            runner.run(engine.close())


def test_greedy_answers_to_images_and_videos_are_those_of_transformers(served: Served) -> None:
    assert "media" in served.engine.abilities
    prompts = prompts_of(served.path, videos=True)
    outputs = served.ask([asked(prompt) for prompt in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == generated_by_transformers(served.path, prompt, 12), prompt.messages
        assert served.difference(0, asked(prompt)[0], output) < TOLERANCE


def test_log_probs_are_those_of_the_trainer(served: Served) -> None:
    prompts = [prompt for prompt in prompts_of(served.path, videos=True) for _ in range(3)]
    asks = [asked(prompt, key=number, temperature=0.8) for number, prompt in enumerate(prompts)]
    for (token_ids, _), output in zip(asks, served.ask(asks), strict=True):
        assert served.difference(0, token_ids, output, temperature=0.8) < TOLERANCE
    assert served.engine.pictures.num_bytes == 0, "given back with the requests"


def long_prompts(served: Served) -> list[Prompt]:
    """Two with equal tokens and images of one size, longer than a block of the cache."""
    text = "<image>" + "abcdefgh" * 40
    found = prompts_from(served.path, [(text, {"images": [png(one)]}) for one in (WIDE, GREENS)])
    assert found[0].token_ids == found[1].token_ids
    return found


def test_what_is_kept_of_a_prompt_is_not_used_for_another_image(served: Served) -> None:
    one, other = (asked(prompt) for prompt in long_prompts(served))
    served.run(served.engine.flush_cache())
    (first,) = served.ask([one])
    before = served.number("cached_tokens")
    (again,) = served.ask([one])
    reused = served.number("cached_tokens") - before
    assert reused >= 128, "the same image and tokens are found in the cache"
    (second,) = served.ask([other])
    assert served.number("cached_tokens") - before == reused, "another image is not"
    assert first.token_ids == again.token_ids
    for asked_for, output in ((one, first), (one, again), (other, second)):
        assert served.difference(0, asked_for[0], output) < TOLERANCE
    assert served.difference(0, one[0], second) > 1e-3, "the images say different things"


def test_a_later_turn_brings_another_image(served: Served) -> None:
    prompt = prompts_of(served.path)[0]
    trajectory = Trajectory(uid="e0-0", sample_index=0, prompt_ids=prompt.token_ids, media=prompt.media)
    (first,) = served.ask([(trajectory.token_ids, Sampling(key=1, max_tokens=8))])
    trajectory = trajectory.with_sampled(first.token_ids, first.log_probs, first.versions)
    assert served.models[0].media is not None
    encoder = served.models[0].media.image_encoder()
    token = load_tokenizer(ModelConfig(path=str(served.path))).convert_tokens_to_ids(IMAGE)
    shown = encoder.expand([7, token, 8], [encoder.read(png(picture(33, 24, RED, GREEN)))])
    trajectory = trajectory.with_given(shown)
    assert len(trajectory.media) == 2
    (second,) = served.ask([(trajectory.token_ids, Sampling(key=2, max_tokens=8))])
    assert served.difference(0, trajectory.token_ids, second) < TOLERANCE
    bare = MediaTokens(trajectory.token_ids, (*prompt.media, trajectory.media[0]))
    with pytest.raises(ValueError, match="tokens that stand for parts of images"):
        served.ask([(bare, Sampling(key=2, max_tokens=8))])


def test_an_aborted_request_with_images_is_continued(served: Served) -> None:
    prompt = prompts_of(served.path)[2]
    token_ids, _ = asked(prompt)
    (whole,) = served.ask([asked(prompt, max_tokens=LONG)])

    async def abort() -> TokenOutput:
        task = await served.begun("a", *asked(prompt, max_tokens=LONG))
        await served.engine.abort(["a"])
        return await task

    part = served.run(abort())
    count = len(part.token_ids)
    assert part.stop_reason == "aborted"
    assert 5 <= count < LONG
    (rest,) = served.ask(
        [
            (
                MediaTokens((*token_ids, *part.token_ids), prompt.media),
                Sampling(key=0, temperature=0.0, max_tokens=LONG - count),
            )
        ]
    )
    assert part.token_ids + rest.token_ids == whole.token_ids
    assert served.engine.pictures.num_bytes == 0


def test_new_weights_of_the_whole_model_and_of_a_frozen_tower_are_used_at_once(served: Served) -> None:
    asks = [asked(prompt) for prompt in [*prompts_of(served.path)[:3], *long_prompts(served)]]
    served.ask(asks)  # prompts and what the tower makes of the images are kept, and must be forgotten
    own = {name: value.clone() for name, value in served.models[1].module.state_dict().items()}
    try:
        served.update(1)
        for (token_ids, _), output in zip(asks, served.ask(asks), strict=True):
            assert served.difference(1, token_ids, output) < TOLERANCE
            assert served.difference(0, token_ids, output) > 0.01
        tower = {
            name: value
            for name, value in served.models[0].module.state_dict().items()
            if ".visual." in f".{name}"
        }
        assert tower
        served.models[1].module.load_state_dict(tower, strict=False)
        served.update(1)  # the language part of the one with the tower of the other
        for (token_ids, _), output in zip(asks, served.ask(asks), strict=True):
            assert served.difference(1, token_ids, output) < TOLERANCE
        probe = probe_of(Engine(served.models[1], EngineConfig(), is_frozen=False))
        found = served.run(served.engine.log_probs(probe.token_ids))
        assert check_probe(probe, found, version=served.engine.version, dtype="float32") < TOLERANCE
    finally:
        served.models[1].module.load_state_dict(own)
        served.update(0)


def test_a_request_in_flight_sees_its_image_with_new_weights(served: Served) -> None:
    old = served.engine.version
    prompt = prompts_of(served.path)[2]
    token_ids, how = asked(prompt, key=3, temperature=1.0, max_tokens=LONG)

    async def update() -> TokenOutput:
        task = await served.begun("u", token_ids, how)
        await asyncio.to_thread(served.write, 1)
        await served.engine.set_version(old + 1)
        return await task

    try:
        output = served.run(update())
        change = output.versions.index(old + 1)
        assert change >= 5
        found = torch.tensor(output.log_probs)
        before, after = (served.log_probs(which, token_ids, output) for which in (0, 1))
        assert (found - before)[:change].abs().max() < TOLERANCE
        assert (found - after)[change:].abs().max() < TOLERANCE
    finally:
        served.update(0)


def test_tokens_of_media_are_never_sampled(served: Served) -> None:
    assert served.models[0].media is not None
    never = set(served.models[0].media.token_ids.values())
    prompt = prompts_of(served.path)[0]
    # vLLM takes no temperature above 2.
    asks = [asked(prompt, key=number, temperature=2.0, max_tokens=40) for number in range(60)]
    outputs = served.ask(asks)
    seen = {token for output in outputs for token in output.token_ids}
    assert len(seen) > 80, "at this temperature most tokens come"
    assert served.difference(0, asks[0][0], outputs[0], temperature=2.0) < TOLERANCE
    assert not seen & never


def test_tokens_and_media_that_do_not_fit_are_refused(served: Served) -> None:
    prompt = prompts_of(served.path)[0]
    with pytest.raises(
        ValueError, match="has 6 tokens that stand for parts of images, but its images take 0"
    ):
        served.ask([(prompt.token_ids, Sampling(key=0, max_tokens=1))])
