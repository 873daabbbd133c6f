"""Families of models, token by token beside transformers' own forward pass: training, its gradient, and rollout.

The table in docs/models.md says what is compared here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import transformers
from default_cases import by_default

from references.language_models import FAMILIES as FEW
from references.language_models import VOCAB, load_plain, plain_greedy, plain_log_probs
from references.model_families import EVERY_RUN, MORE, REFUSED
from references.token_passes import log_probs_of, of_log_probs
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import check_language_model, load_model
from strop.engines.packing import make_rows
from strop.engines.training import TrainEngine
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling, TokenOutput

FAMILIES = [
    *FEW,
    *EVERY_RUN,
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE if kind not in EVERY_RUN),
]
SAMPLED = by_default(
    FAMILIES, "mixtral", "gemma2", "gpt_oss", "deepseek_v3", "cohere2", "olmo3", "smollm3", *EVERY_RUN
)
"""The others sample with attention that one of these has too; every family is trained below."""
LENGTHS = ((9, 7), (1, 1), (14, 12), (6, 11))
"""Tokens of prompts and responses; beyond the window of the models that have one."""


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PAIRS = [(tokens(p, p), tokens(r, 100 + r)) for p, r in LENGTHS]
PAIRS.append((PAIRS[0][0], tokens(13, 7)))  # a second sample of the first prompt


@pytest.mark.parametrize("kind", FAMILIES)
def test_training_gives_the_log_probs_and_gradients_of_transformers(
    tiny_folder: Callable[[str], Path], kind: str
) -> None:
    plain = load_plain(tiny_folder(kind), dtype=torch.float32)
    wanted = torch.cat([plain_log_probs(plain, p, r, temperature=0.7)[0] for p, r in PAIRS])
    weight = torch.cos(torch.arange(len(wanted)))
    (wanted * weight).sum().backward()

    model = load(tiny_folder, kind)
    rows = make_rows([torch.tensor(p) for p, _ in PAIRS], [torch.tensor(r) for _, r in PAIRS])
    seen = torch.zeros(len(wanted))

    def loss(log_probs: torch.Tensor, entropies: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        seen[index] = log_probs.detach()
        return (log_probs * weight[index]).sum()

    engine = TrainEngine(model, EngineConfig(max_tokens_per_device=40), OptimizerConfig(), total_steps=None)
    engine.accumulate(rows, of_log_probs(loss, temperature=0.7))
    torch.testing.assert_close(seen, wanted.detach(), atol=2e-5, rtol=2e-5)
    ours = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            assert ours[name].grad is None, name
            continue
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(
            ours[name].grad,
            parameter.grad,
            atol=1e-4 * max(scale, 1e-3),
            rtol=1e-3,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("kind", FAMILIES)
def test_in_float64_a_model_is_the_same_function(tiny_folder: Callable[[str], Path], kind: str) -> None:
    rows = make_rows([torch.tensor(p) for p, _ in PAIRS], [torch.tensor(r) for _, r in PAIRS])
    wide, usual = (
        log_probs_of(load(tiny_folder, kind, dtype=dtype), rows, temperature=0.7)[0]
        for dtype in ("float64", "float32")
    )
    torch.testing.assert_close(wide.float(), usual, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", SAMPLED)
def test_rollout_samples_with_the_log_probs_of_transformers_and_greedily_as_generate(
    tiny_folder: Callable[[str], Path], kind: str
) -> None:
    model, plain = load(tiny_folder, kind), load_plain(tiny_folder(kind), dtype=torch.float32)

    async def play() -> list[TokenOutput]:
        engine = NativeEngine(model, max_running=4)
        how = [Sampling(key=i, max_tokens=20) for i in range(len(PAIRS))]
        greedy = Sampling(key=0, max_tokens=12, temperature=0.0)
        asked = [(PAIRS[i][0], one) for i, one in enumerate(how)] + [(PAIRS[2][0], greedy)]
        return await asyncio.gather(*(engine.generate(str(i), *one) for i, one in enumerate(asked)))

    *sampled, greedy = asyncio.run(play())
    for (prompt, _), output in zip(PAIRS, sampled, strict=True):
        with torch.no_grad():
            wanted, _ = plain_log_probs(plain, prompt, output.token_ids, temperature=1.0)
        torch.testing.assert_close(torch.tensor(output.log_probs), wanted, atol=5e-5, rtol=5e-5)
    assert list(greedy.token_ids) == plain_greedy(plain, PAIRS[2][0], 12)


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_that_are_not_carried_are_refused_by_name_from_their_configuration_alone(
    tmp_path: Path, model_type: str
) -> None:
    settings, sentence = REFUSED[model_type]
    transformers.AutoConfig.for_model(model_type, **settings).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        check_language_model(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    ("model_type", "remedy"), [("kimi_vl", "models.md"), ("internvl_chat", "ends with -hf")]
)
def test_code_beside_weights_that_reads_images_is_refused_by_name_and_not_run(
    tmp_path: Path, model_type: str, remedy: str, trust: bool
) -> None:
    named = {"AutoConfig": "its_code.Config", "AutoModel": "its_code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": named}))
    (tmp_path / "its_code.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(
        ValueError, match=rf"is a {model_type}, which reads images by code that lies.*{remedy}"
    ):
        check_language_model(ModelConfig(path=str(tmp_path), trust_remote_code=trust))


def load(
    tiny_folder: Callable[[str], Path], kind: str, *, dtype: Literal["float32", "float64"] = "float32"
) -> CausalLM:
    return load_model(ModelConfig(path=str(tiny_folder(kind)), dtype=dtype), device="cpu")
