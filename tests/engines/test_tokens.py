"""One pass over packed rows: whatever is asked of the tokens, the model runs once per micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from references.language_models import VOCAB
from references.token_passes import log_probs_of
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, ModelConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.tokens import Tokens
from strop.engines.training import Engine
from strop.protocol import DataProto, columns

LENGTHS = (4, 1, 6, 3)


@pytest.fixture
def model(tiny_folder: Callable[[str], Path]) -> CausalLM:
    return load_model(ModelConfig(path=str(tiny_folder("qwen3")), dtype="float64"), device="cpu")


def engine(model: CausalLM, max_tokens: int) -> Engine:
    return Engine(model, EngineConfig(max_tokens_per_device=max_tokens), is_frozen=False)


def rows() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in (5, 2, 5, 7)]
    return make_rows(prompts, [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS])


def test_several_quantities_come_from_one_forward_pass(model: CausalLM) -> None:
    passes: list[int] = []
    model.module.base_model.register_forward_pre_hook(lambda *_: passes.append(1))  # type: ignore[operator,union-attr]

    def asked(tokens: Tokens) -> dict[str, Tensor]:
        log_probs, entropies = tokens.log_probs(temperature=0.7)
        ids, best = tokens.top_k(VOCAB, temperature=0.7)
        return {
            "log_probs": log_probs,
            "entropies": entropies,
            "squares": tokens.sum_pi_squared(temperature=0.7),
            "ids": ids,
            "best": best,
        }

    for max_tokens, count in ((100, 1), (12, 3)):
        passes.clear()
        made = engine(model, max_tokens).map_tokens(rows(), asked)
        assert len(passes) == count
        # All tokens of the vocabulary, the most likely first, say everything about the distribution.
        probs, targets = made["best"].exp(), columns.flat(rows().tensors()["responses"])
        torch.testing.assert_close(probs.square().sum(1), made["squares"])
        torch.testing.assert_close(-(probs * made["best"]).sum(1), made["entropies"])
        torch.testing.assert_close(made["best"][made["ids"] == targets[:, None]], made["log_probs"])


def test_results_stand_in_the_order_of_their_places_also_for_some_of_the_rows(model: CausalLM) -> None:
    every, _ = log_probs_of(model, rows(), temperature=1.0)
    for max_tokens in (100, 12):
        found, _ = log_probs_of(model, rows(), temperature=1.0, max_tokens=max_tokens, rows=[3, 1])
        torch.testing.assert_close(found, torch.cat([every[4:5], every[11:14]]), atol=1e-12, rtol=1e-12)


def test_without_rows_the_results_are_empty_and_have_their_shape(model: CausalLM) -> None:
    def asked(tokens: Tokens) -> dict[str, Tensor]:
        ids, log_probs = tokens.top_k(3, temperature=1.0)
        return {"ids": ids.to(torch.int32), "log_probs": log_probs}

    made = engine(model, 10).map_tokens(rows()[:0], asked)
    assert (made["ids"].shape, made["ids"].dtype) == ((0, 3), torch.int32)
    assert (made["log_probs"].shape, made["log_probs"].dtype) == ((0, 3), torch.float64)
