"""The engine with its matrices cut over ranks: losses, gradients, steps and values of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from references.engine_steps import (
    PAIRS,
    Setting,
    check,
    engine_of,
    one_process,
    rank_step,
    run_step,
)
from references.language_models import exact_norms
from references.rank_processes import Ranks, run_ranks
from strop.engines.packing import make_rows
from strop.engines.parallel.ranks import Parallel, alone
from strop.engines.parallel.tensor import check_tensor_parallel
from strop.engines.tokens import Tokens

SLOW = pytest.mark.slow
Folder = Callable[[str], Path]


# Norms of queries and keys, a head that is the embedding; a head of its own; windows; one key head; biases.
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3",
        "llama_mqa",
        pytest.param("llama", marks=SLOW),
        pytest.param("gemma3", marks=SLOW),
        pytest.param("llama_biased", marks=SLOW),
    ],
)
def test_two_ranks_of_a_matrix_take_the_step_of_one_process(tiny_folder: Folder, kind: str) -> None:
    setting = Setting(folder=str(tiny_folder(kind)))
    expected = one_process(setting)
    check(Setting(folder=setting.folder, tp_size=2), PAIRS, 2, expected)


@pytest.mark.parametrize(
    ("checkpointing", "sync"), [(True, "last"), pytest.param(False, "each", marks=pytest.mark.slow)]
)
def test_rows_cut_into_micro_batches_with_checkpointing(
    tiny_folder: Folder, checkpointing: bool, sync: str
) -> None:
    folder = str(tiny_folder("qwen3"))
    expected = one_process(Setting(folder=folder))
    setting = Setting(folder=folder, tp_size=2, max_tokens=28, checkpointing=checkpointing, sync=sync)
    check(setting, PAIRS, 2, expected)


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_values_over_two_ranks(value_folder: Path, checkpointing: bool) -> None:
    expected = one_process(Setting(folder=str(value_folder), values=True))
    split = Setting(
        folder=str(value_folder), values=True, tp_size=2, max_tokens=28, checkpointing=checkpointing
    )
    check(split, PAIRS, 2, expected)


@pytest.mark.dist
@pytest.mark.parametrize(("tp_size", "max_tokens"), [(2, 28), (2, 1000), (4, 1000)])
def test_four_ranks_take_the_step_of_one_process(tiny_folder: Folder, tp_size: int, max_tokens: int) -> None:
    folder = str(tiny_folder("qwen3"))  # two key heads: on four ranks each is on two
    expected = one_process(Setting(folder=folder))
    cut = Setting(folder=folder, tp_size=tp_size, max_tokens=max_tokens, checkpointing=True)
    check(cut, PAIRS, 4, expected)


@pytest.mark.dist
def test_a_group_of_ranks_without_rows_takes_the_same_step(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("qwen3"))
    pairs = PAIRS[3:4]  # the second of two groups has none
    expected = run_step(alone("cpu"), Setting(folder=folder), pairs)
    check(Setting(folder=folder, tp_size=2, checkpointing=True), pairs, 4, expected)


CHOSEN = torch.stack([torch.arange(47) % 30, 31 + torch.arange(47) % 29], dim=1)
"""Two further tokens in the place of each response token, of both halves of the vocabulary."""


def said(parallel: Parallel, setting: Setting) -> dict[str, Tensor]:
    """All that can be asked of the distributions of the tokens, and the gradient of some of it by the head."""
    with exact_norms():
        engine = engine_of(parallel, setting)
        rows = make_rows([torch.tensor(p) for p, _ in PAIRS], [torch.tensor(r) for _, r in PAIRS])

        def function(tokens: Tokens) -> dict[str, Tensor]:
            ids, top = tokens.top_k(5, temperature=0.7, banned=torch.tensor([40, 3]))
            log_probs, entropies, at = tokens.log_probs_at(CHOSEN[tokens.response_index], temperature=0.7)
            return {
                "ids": ids, "top": top, "log_probs": log_probs, "entropies": entropies, "at": at.log_probs,
                "is_likely": at.is_likely, "squares": tokens.sum_pi_squared(temperature=0.7),
            }  # fmt: skip

        return engine.map_tokens(rows, function)


def said_on_ranks(ranks: Ranks, setting: Setting) -> dict[str, Tensor]:
    return said(ranks.join(tensor_parallel=setting.tp_size), setting)


def test_each_rank_says_of_the_whole_vocabulary_what_one_process_does(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("llama"))
    expected = said(alone("cpu"), Setting(folder=folder))
    assert not set(expected["ids"].flatten().tolist()) & {40, 3}
    assert 0 < int(expected["is_likely"].sum()) < expected["is_likely"].numel()
    for found in run_ranks(said_on_ranks, 2, Setting(folder=folder, tp_size=2)):
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(
    ("config", "tp_size", "sentence"),
    [
        (transformers.GPT2Config(), 2, "transformers does not say how the matrices of gpt2 are cut"),
        (
            transformers.OlmoeConfig(),
            2,
            "are cut as colwise_gather_output, rowwise_split_input, which strop does not do",
        ),
        (
            transformers.LlamaConfig(hidden_size=48, num_attention_heads=6),
            4,
            "the 6 attention heads .* use one of 1, 2",
        ),
        (
            transformers.LlamaConfig(hidden_size=48, num_attention_heads=12, num_key_value_heads=3),
            2,
            "the 3 key-value heads .* use one of 1$",
        ),
        (transformers.LlamaConfig(intermediate_size=30), 4, "the 30 hidden units .* use one of 1, 2"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(config: Any, tp_size: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^critic.engine.tensor_parallel is {tp_size}, but .*{sentence}"):
        check_tensor_parallel(config, tp_size, section="critic.engine")


def held(ranks: Ranks, folder: str) -> dict[str, Any]:
    """In a rank: shapes of what it holds, and digests."""
    with exact_norms():
        engine = engine_of(ranks.join(tensor_parallel=2), Setting(folder=folder, tp_size=2))
        shapes = {
            name: tuple(parameter.to_local().shape) if isinstance(parameter, DTensor) else None
            for name, parameter in engine.model.named_parameters()
        }
        return {"shapes": shapes, "checksum": engine.checksum()}


def test_each_rank_holds_half_of_each_matrix_and_the_weights_have_the_digest_of_one_process(
    tiny_folder: Folder,
) -> None:
    folder = str(tiny_folder("qwen3"))
    with exact_norms():
        whole = engine_of(alone("cpu"), Setting(folder=folder))
        expected = {name: tuple(parameter.shape) for name, parameter in whole.model.named_parameters()}
    first, second = run_ranks(held, 2, folder)
    assert first["checksum"] == second["checksum"] == whole.checksum()
    for name, shape in expected.items():
        halves = first["shapes"][name], second["shapes"][name]
        if "norm" in name:
            assert halves == (shape, shape)
        elif "o_proj" in name or "down_proj" in name:
            assert halves == ((shape[0], shape[1] // 2),) * 2
        else:  # 61 tokens: 31 and 30
            assert halves == ((-(-shape[0] // 2), *shape[1:]), (shape[0] // 2, *shape[1:]))


@pytest.mark.parametrize(
    ("dtype", "largest", "mean"),
    [pytest.param("float32", 1e-4, 1e-5, marks=pytest.mark.slow), ("bfloat16", 0.4, 0.08)],
)
def test_lower_precisions_stay_near_one_process(
    tiny_folder: Folder, dtype: str, largest: float, mean: float
) -> None:
    """As for ranks that share a sequence: 2^-24 and 2^-9 per operation, on log-probs of size 4."""
    folder = str(tiny_folder("qwen3"))
    exact = one_process(Setting(folder=folder, dtype="float32"))
    one, other = run_ranks(rank_step, 2, Setting(folder=folder, tp_size=2, dtype=dtype), PAIRS)
    assert one.loss == other.loss
    for ours, wanted in zip(one.before, exact.before, strict=True):
        assert float((ours - wanted).abs().max()) < largest
        assert float((ours - wanted).abs().mean()) < mean
    assert one.grad_norm == pytest.approx(exact.grad_norm, rel=0.05)
