"""Native generation from prompts with images and videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from default_cases import by_default
from rollout_cases import answers, run, tokens

from references.tiny_vision import KINDS, save_tiny_vision
from references.token_passes import log_probs_of
from references.vision_prompts import asked, generated_by_transformers, prompts_of
from strop.engines.causal_lm import CausalLM
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.protocol.trajectory import MediaTokens, Prompt
from strop.rollout.native.batch import DecodeBatch, Request
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, CausalLM]]:
    transformers.utils.logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("vision")
    loaded: dict[str, tuple[Path, CausalLM]] = {}

    def get(kind: str) -> tuple[Path, CausalLM]:
        if kind not in loaded:
            path = save_tiny_vision(kind, root / kind)
            loaded[kind] = path, load_model(ModelConfig(path=str(path)), device="cpu")
        return loaded[kind]

    return get


@pytest.mark.parametrize("kind", by_default(KINDS, "qwen2_5_vl", "qwen3_vl", "qwen3_5"))
def test_greedy_answers_to_images_are_those_of_transformers(
    kind: str, models: Callable[[str], tuple[Path, CausalLM]]
) -> None:
    path, model = models(kind)
    prompts = prompts_of(path, videos=kind not in ("glm4v", "qwen3_5"))
    outputs = answers(model, [asked(prompt) for prompt in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == generated_by_transformers(path, prompt, 12), prompt.messages


@pytest.mark.parametrize("kind", by_default(KINDS, "qwen2_5_vl", "qwen3_vl", "qwen3_5"))
def test_log_probs_of_engine_and_trainer_agree(
    kind: str, models: Callable[[str], tuple[Path, CausalLM]]
) -> None:
    path, model = models(kind)
    prompts = [
        prompt for prompt in prompts_of(path, videos=kind not in ("glm4v", "qwen3_5")) for _ in range(3)
    ]
    asks = [asked(prompt, key=number, temperature=0.8) for number, prompt in enumerate(prompts)]
    outputs = answers(model, asks, max_running=5)
    rows = make_rows(
        [torch.tensor(prompt.token_ids) for prompt in prompts],
        [torch.tensor(output.token_ids) for output in outputs],
        [prompt.media for prompt in prompts],
    )
    trained, _ = log_probs_of(model, rows, temperature=0.8, max_tokens=300)
    sampled = torch.tensor([value for output in outputs for value in output.log_probs])
    assert float((trained - sampled).abs().max()) < 1e-4


def test_order_and_neighbours_do_not_matter(models: Callable[[str], tuple[Path, CausalLM]]) -> None:
    path, model = models("qwen2_vl")
    prompts = prompts_of(path, videos=True) * 2
    asks = [asked(prompt, key=n, temperature=1.0, max_tokens=4 + n) for n, prompt in enumerate(prompts)]
    together = answers(model, asks)
    backwards = answers(model, asks, max_running=3, order=range(len(asks))[::-1])
    assert [one.token_ids for one in together] == [one.token_ids for one in backwards]


def test_a_prompt_of_a_group_is_computed_once_and_equal_tokens_with_other_images_apart(
    models: Callable[[str], tuple[Path, CausalLM]],
) -> None:
    path, model = models("qwen2_vl")
    one, other, *_ = prompts_of(path)
    assert one.token_ids == other.token_ids
    batch = DecodeBatch(model, max_running=8)
    for number in range(3):
        for prompt in (one, other):
            sampling = Sampling(key=number, max_tokens=2)
            batch.waiting.append(Request(f"{prompt.uid}/{number}", prompt.token_ids, sampling, prompt.media))
    batch.step(0)
    assert batch.prefill.num_computed == 2 * len(one.token_ids)


def test_media_tokens_are_never_sampled(models: Callable[[str], tuple[Path, CausalLM]]) -> None:
    path, model = models("qwen2_vl")
    prompt = prompts_of(path)[0]
    asks = [asked(prompt, key=number, temperature=50.0, max_tokens=40) for number in range(30)]
    seen = {token for output in answers(model, asks) for token in output.token_ids}
    assert len(seen) > 95, "at this temperature nearly every token comes"
    assert not seen & {105, 106}


@pytest.mark.parametrize(
    ("broken", "match"),
    [
        (
            lambda p: p.token_ids,
            "request r has 6 tokens that stand for parts of images, but its images take 0",
        ),
        (lambda p: MediaTokens(p.token_ids[:-9], p.media), "has 1 tokens that stand .* take 6"),
        (lambda p: MediaTokens(p.token_ids * 2, p.media), "has 12 tokens that stand .* take 6"),
    ],
)
def test_tokens_and_media_that_do_not_fit_are_refused(
    broken: Callable[[Prompt], Sequence[int]], match: str, models: Callable[[str], tuple[Path, CausalLM]]
) -> None:
    path, model = models("qwen2_vl")
    with pytest.raises(ValueError, match=match):
        run(
            NativeEngine(model, max_running=2).generate(
                "r", broken(prompts_of(path)[0]), Sampling(key=0, max_tokens=1)
            )
        )


def test_a_model_of_text_refuses_images(
    models: Callable[[str], tuple[Path, CausalLM]], tiny: Callable[..., CausalLM]
) -> None:
    media = prompts_of(models("qwen2_vl")[0])[0].media
    with pytest.raises(ValueError, match="request r has 1 images or videos, but the model takes text alone"):
        run(
            NativeEngine(tiny("qwen3"), max_running=2).generate(
                "r", MediaTokens(tokens(9, 0), media), Sampling(key=0, max_tokens=1)
            )
        )
