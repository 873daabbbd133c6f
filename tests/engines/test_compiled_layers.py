"""Compiled layers: the numbers of those that are not, and one function for rows of any packing.

FlashAttention over segments of unequal lengths, which is one operation to the compiler, runs on CUDA alone: an
operation of the same form stands in for it here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from references.language_models import config, save_model
from references.rank_processes import Ranks, run_ranks
from references.token_passes import log_probs_of, of_log_probs
from strop.engines import attention, varlen
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.gradients import full
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.parallel.ranks import Parallel
from strop.engines.training import TrainEngine
from strop.protocol import DataProto

NUM_LAYERS = 9
"""More than the functions that the compiler makes of one piece of Python before it gives up (8)."""
GROUPS = [(5, [7, 3]), (9, [2]), (3, [11, 4, 4, 6, 1]), (12, [30]), (2, [2, 2]), (6, [5, 5, 5])]
"""Length of a prompt and of its responses: rows that share a beginning, a row alone, and others like them."""


Ends = tuple[Tensor, Tensor]


def segments_of(
    query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Of each segment its queries, its keys, and weights [H, q, k], keys and values [k, H, D] of its query heads."""
    query_ends, key_ends = (end.tolist() for end in ends)
    for (q0, q1), (k0, k1) in zip(pairwise(query_ends), pairwise(key_ends), strict=True):
        keys, values = (
            part[k0:k1].repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value)
        )
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], keys) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        yield slice(q0, q1), slice(k0, k1), weights, keys, values


@torch.library.custom_op("strop_tests::varlen", mutates_args=())
def stand_in(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, max_queries: int,
    max_keys: int, scale: float,
) -> Tensor:  # fmt: skip
    """Attention output [N, H, D]."""
    segments = segments_of(query, key, value, (query_ends, key_ends), scale)
    return torch.cat([torch.einsum("hqk,khd->qhd", weights, values) for _, _, weights, _, values in segments])


@stand_in.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op("strop_tests::varlen_back", mutates_args=())
def stand_in_back(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value."""
    by_query, by_key, by_value = (torch.zeros(part.shape) for part in (query, key, value))
    heads = (-1, query.shape[1] // key.shape[1])
    for q, k, weights, keys, values in segments_of(query, key, value, (query_ends, key_ends), scale):
        by_weight = torch.einsum("qhd,khd->hqk", grad[q], values)
        by_score = weights * (by_weight - (by_weight * weights).sum(-1, keepdim=True)) * scale
        by_query[q] = torch.einsum("hqk,khd->qhd", by_score, keys)
        by_key[k] = torch.einsum("hqk,qhd->khd", by_score, query[q]).unflatten(1, heads).sum(2)
        by_value[k] = torch.einsum("hqk,qhd->khd", weights, grad[q]).unflatten(1, heads).sum(2)
    return by_query, by_key, by_value


@stand_in_back.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty(part.shape) for part in (query, key, value))


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.scale = inputs[7]


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*torch.ops.strop_tests.varlen_back(grad, *ctx.saved_tensors, ctx.scale), *[None] * 5)


torch.library.register_autograd("strop_tests::varlen", _back, setup_context=_keep)


def kernel(*tensors: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
    assert window_size == (-1, 0)
    output: Tensor = torch.ops.strop_tests.varlen(*tensors, scale)
    return output


def use_stand_in(patch: pytest.MonkeyPatch) -> None:
    """Have packed attention be one operation, in float32."""
    patch.setattr(varlen, "runs_on", lambda device: True)
    patch.setattr(attention, "runs_on", lambda device: True)
    patch.setattr(attention, "half_of", lambda query, value, form: query.dtype)
    patch.setattr(varlen, "flash_attention", lambda: kernel)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = config("qwen3")
    shape.num_hidden_layers, shape.layer_types = NUM_LAYERS, ["full_attention"] * NUM_LAYERS
    save_model(shape, tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Functions of one test alone, and none of the compiler's own notes, which take longer than it."""
    notes = logging.getLogger("torch.__trace")
    level = notes.level
    notes.setLevel(logging.CRITICAL)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    notes.setLevel(level)


def batches() -> Iterator[DataProto]:
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> Tensor:
        return torch.randint(2, 60, (length,), generator=generator)

    for prompt, responses in GROUPS:
        start = ids(prompt)
        yield make_rows([start] * len(responses), [ids(length) for length in responses])


def loss(log_probs: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return -log_probs.sum() / 10


def run(
    model_config: ModelConfig,
    *,
    compiles: bool,
    backend: str = "eager",
    parallel: Parallel | None = None,
    rows: slice = slice(None),
    **engine_settings: Any,
) -> dict[str, Any]:
    """Losses, log-probs and gradients of all batches, and how many functions there were behind each."""
    model = load_model(model_config, device="cpu", parallel=parallel)
    with pytest.MonkeyPatch.context() as patch:
        compile_by = functools.partialmethod(torch.nn.Module.compile, backend=backend)
        patch.setattr(torch.nn.Module, "compile", compile_by)
        engine = TrainEngine(
            model,
            EngineConfig(compile=compiles, **engine_settings),
            OptimizerConfig(),
            total_steps=None,
            parallel=parallel,
        )
    counters.clear()
    losses, log_probs, functions = [], [], []
    for batch in list(batches())[rows]:
        losses.append(float(engine.accumulate(batch, of_log_probs(loss, temperature=1.0))))
        log_probs.append(log_probs_of(engine, batch, temperature=1.0)[0])
        functions.append(counters["stats"]["unique_graphs"])
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {
        "losses": losses, "log_probs": torch.cat(log_probs), "gradients": gradients, "functions": functions,
        "breaks": sum(counters["graph_break"].values()),
    }  # fmt: skip


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    torch.testing.assert_close(found["log_probs"], expected["log_probs"], atol=1e-4, rtol=1e-4)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        scale = float(gradient.abs().max()) + 1e-6
        torch.testing.assert_close(found["gradients"][name], gradient, atol=1e-4 * scale, rtol=0)


FORMS = {
    # With a gradient and without.
    "plain": 2,
    # The first layer of a pass without a gradient has an input of another kind.
    "checkpointing": 3,
    # The first layer of a pass with a gradient has an input that needs none.
    "adapter": 3,
}
"""Functions for rows that share beginnings, and as many for rows that do not."""


def settings_of(folder: Path | str, form: str) -> ModelConfig:
    lora = LoraConfig(rank=2, alpha=4.0) if form == "adapter" else LoraConfig()
    return ModelConfig(path=str(folder), gradient_checkpointing=form == "checkpointing", lora=lora)


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=[pytest.mark.slow] if f != "plain" else []) for f in FORMS]
)
def test_rows_of_any_packing_are_one_function(
    folder: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_in(monkeypatch)
    # Of an adapter by the compiler's own backward pass too.
    backend = "aot_eager" if form == "adapter" else "eager"
    found = run(settings_of(folder, form), compiles=True, backend=backend)
    assert found["breaks"] == 0
    first, *others = found["functions"]
    assert first == FORMS[form], "for all layers"
    assert set(others) == {2 * FORMS[form]}, "for all batches"
    same(found, run(settings_of(folder, form), compiles=False))


def test_rows_that_share_no_beginning_have_a_second_function(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_in(monkeypatch)
    model = load_model(ModelConfig(path=str(folder)), device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend="eager")
        )
        model.compile_layers()
    counters.clear()
    engine = TrainEngine(model, EngineConfig(), OptimizerConfig(), total_steps=None)
    seen = []
    for responses in (
        [[7, 3, 4]],
        [[5, 9], [8, 3]],
        [[6, 2]],
        [[4, 4, 4], [2, 3], [9, 9]],
        [[3, 3, 3, 3, 3]],
    ):
        batch = make_rows([torch.tensor([5, 2])] * len(responses), [torch.tensor(r) for r in responses])
        log_probs_of(engine, batch, temperature=1.0)
        seen.append(counters["stats"]["unique_graphs"])
    assert seen == [1, 2, 2, 2, 2]
    log_probs_of(engine, make_rows([torch.tensor([5])], [torch.tensor([7])]), temperature=1.0)
    assert counters["stats"]["unique_graphs"] == 2, "one token passes as it is"


@pytest.mark.slow
def test_around_attention_in_parts_are_two_functions(folder: Path) -> None:
    settings = ModelConfig(path=str(folder))
    found = run(settings, compiles=True)
    assert found["breaks"] > 0
    assert len(set(found["functions"])) == 1, "later batches need no others"
    same(found, run(settings, compiles=False))


def on_ranks(ranks: Ranks, folder: str, form: str, engine_settings: dict[str, Any]) -> list[dict[str, Any]]:
    parallel = ranks.join(**engine_settings)
    rows = slice(None)
    if parallel.dp_size > 1:
        rows = slice(0, 3) if ranks.rank == 0 else slice(3, None)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        use_stand_in(patch)
        return [
            run(settings_of(folder, form), compiles=compiles, parallel=parallel, rows=rows, **engine_settings)
            for compiles in (True, False)
        ]


@pytest.mark.dist
@pytest.mark.parametrize("form", ["plain", pytest.param("checkpointing", marks=pytest.mark.slow)])
def test_sharded_layers_are_compiled_between_their_hooks(folder: Path, form: str) -> None:
    for found, expected in run_ranks(on_ranks, 2, str(folder), form, {}):
        assert found["functions"][-1] == 2 * FORMS[form], "for all layers and batches"
        same(found, expected)


@pytest.mark.dist
@pytest.mark.slow
def test_layers_of_stages_are_compiled(folder: Path) -> None:
    for found, expected in run_ranks(on_ranks, 2, str(folder), "plain", {"pipeline_parallel": 2}):
        assert found["breaks"] == 0
        assert len(set(found["functions"][1:])) == 1, "later batches need no others"
        same(found, expected)
