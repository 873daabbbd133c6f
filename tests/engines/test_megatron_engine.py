"""The Megatron engine against the torch engine: the same mini-batch gives the same loss, gradient norm and weights."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from references.engine_steps import PAIRS, Result, Setting, one_process
from references.language_models import config, save_model
from references.own_ranks import own_ranks
from references.rank_processes import Ranks, run_ranks
from strop.engines.megatron import checks
from strop.engines.megatron.core_fields import transformer_fields
from strop.engines.packing import make_rows
from strop.engines.tokens import Tokens

__all__ = ["own_ranks"]  # the fixture

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
Folder = Callable[[str], Path]
FLOAT64 = {"atol": 1e-10, "rtol": 1e-10}
FLOAT32 = {"atol": 1e-4, "rtol": 1e-4}
ROUTED = {"atol": 1e-6, "rtol": 1e-6}
"""The router of megatron-core takes its softmax in float32 whatever the model has."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One way to divide the model and the rows."""

    tp: int = 1
    pp: int = 1
    chunks: int = 1
    layers: tuple[int, ...] = ()
    fields: tuple[tuple[str, object], ...] = ()
    """Of TransformerConfig."""
    ep: int = 1
    cp: int = 1
    dp: int = 1
    distributed: bool = False
    max_tokens: int = 40
    dtype: str = "float64"
    checkpointing: bool = False

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


def step(ranks: Ranks, folder: str, mesh: Mesh, values: bool) -> Result:
    """In a rank: one step of the Megatron engine on its rows."""
    from references.megatron_cpu import use_cpu

    use_cpu()
    from references.engine_steps import run_engine_step
    from references.megatron_ranks import megatron_engine

    return run_engine_step(megatron_engine(ranks, folder, mesh, values=values), PAIRS, values=values)


def compare(folder: Path, mesh: Mesh, close: dict[str, float], *, values: bool = False) -> None:
    expected = one_process(Setting(folder=str(folder), dtype=mesh.dtype, values=values))
    results = run_ranks(step, mesh.size, str(folder), mesh, values, timeout_s=200)
    per_stage = mesh.size // mesh.pp
    ends = torch.tensor([len(response) for _, response in PAIRS]).cumsum(0).tolist()
    places = [torch.arange(end - len(r), end) for end, (_, r) in zip(ends, PAIRS, strict=True)]
    firsts = results[: per_stage : mesh.tp * mesh.cp]
    assert sum(result.loss for result in firsts) == pytest.approx(
        expected.loss, abs=close["atol"] * 10, rel=close["rtol"]
    )
    for rank, result in enumerate(results):
        first = firsts[rank % per_stage // (mesh.tp * mesh.cp)]
        assert (result.rows, result.loss) == (first.rows, first.loss)
        assert result.grad_norm == pytest.approx(expected.grad_norm, abs=close["atol"], rel=close["rtol"])
        mine = torch.cat([places[i] for i in result.rows]) if result.rows else torch.zeros(0).long()
        for ours, whole in zip(result.before + result.after, expected.before + expected.after, strict=True):
            torch.testing.assert_close(ours, whole[mine], **close)
        assert result.weights.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            torch.testing.assert_close(
                result.weights[name], weight, **close, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_one_process_takes_the_step_of_the_torch_engine(tiny_folder: Folder, kind: str) -> None:
    compare(tiny_folder(kind), Mesh(), FLOAT64)


def short_while_packing(ranks: Ranks, folder: str) -> list[tuple[int | None, int, int]]:
    """In a rank: tokens and bounds of the halvings, where the first packing behind an earlier pass finds no memory."""
    from references.megatron_cpu import use_cpu

    use_cpu()
    from references.megatron_ranks import megatron_engine
    from strop.engines.megatron import engine as module
    from strop.engines.token_budget import within_memory

    engine = megatron_engine(ranks, folder, Mesh(), values=False)
    data = make_rows([torch.tensor(prompt) for prompt, _ in PAIRS], [torch.tensor(r) for _, r in PAIRS])
    pack, calls = module.pack, list[int]()

    def packing(*args: object, rows: list[int], **fields: object) -> Tokens:
        calls.append(len(rows))
        if len(calls) == 2:
            torch.empty(1 << 55, dtype=torch.uint8)
        return pack(*args, rows=rows, **fields)  # type: ignore[arg-type]

    module.pack = packing  # type: ignore[assignment]
    try:
        for rows in ([0], None):
            within_memory(
                engine,
                lambda rows=rows: engine.accumulate(
                    data, lambda tokens: tokens.log_probs(temperature=1.0)[0].sum(), rows=rows
                ),
            )
    finally:
        module.pack = pack
    return [(halving.tokens, halving.before, halving.after) for halving in engine.budget.take_halvings()]


def test_memory_that_runs_out_while_packing_halves_once(tiny_folder: Folder) -> None:
    found = run_ranks(short_while_packing, 1, str(tiny_folder("qwen3")), timeout_s=200)
    assert found == [[(None, 40, 20)]]


def set_fields(ranks: Ranks, folder: str) -> tuple[frozenset[str], frozenset[str]]:
    """In a rank: the fields of TransformerConfig that a model with experts and an engine set."""
    from references.megatron_cpu import use_cpu

    use_cpu()
    from strop.engines.config import EngineConfig, ModelConfig
    from strop.engines.megatron import model
    from strop.engines.model import load_model

    of_engine = model._axis_settings(EngineConfig(kind="megatron"), torch.device("cpu"))
    return frozenset(model._model_settings(load_model(ModelConfig(path=folder)))), frozenset(of_engine)


def test_the_fields_that_are_set_are_those_that_are_refused(tiny_folder: Folder) -> None:
    fields = run_ranks(set_fields, 1, str(tiny_folder("qwen3_moe")), timeout_s=200)
    assert fields == [(checks.SET_BY_MODEL, checks.SET_BY_ENGINE)]


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["qwen2", "mistral", "qwen3_moe"])
def test_further_families(tiny_folder: Folder, kind: str) -> None:
    compare(tiny_folder(kind), Mesh(), ROUTED if kind == "qwen3_moe" else FLOAT64)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_tensor_parallel(tiny_folder: Folder, kind: str) -> None:
    compare(tiny_folder(kind), Mesh(tp=2), FLOAT64)


@pytest.mark.dist
@pytest.mark.parametrize("distributed", [False, True])
def test_data_parallel(tiny_folder: Folder, distributed: bool) -> None:
    dtype, close = ("float32", FLOAT32) if distributed else ("float64", FLOAT64)
    compare(tiny_folder("qwen3"), Mesh(dp=2, distributed=distributed, dtype=dtype), close)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_pipeline_parallel(tiny_folder: Folder, kind: str) -> None:
    compare(tiny_folder(kind), Mesh(pp=2), FLOAT64)


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two parts of it for each of two stages."""
    return with_layers(tmp_path_factory.mktemp("four_layers"), 4)


@pytest.mark.dist
@pytest.mark.parametrize("max_tokens", [40, 1000])  # micro-batches that are no multiple of the stages
def test_interleaved_stages(four_layers: Path, max_tokens: int) -> None:
    compare(four_layers, Mesh(pp=2, chunks=2, max_tokens=max_tokens), FLOAT64)


def with_layers(folder: Path, num_layers: int, kind: str = "qwen3") -> Path:
    shape = config(kind)
    shape.num_hidden_layers, shape.layer_types = num_layers, ["full_attention"] * num_layers
    save_model(shape, folder)
    return folder


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("num_layers", "mesh"),
    [
        (5, Mesh(pp=2, fields=((FIRST, 2),))),
        (5, Mesh(pp=2, fields=((LAST, 2), (FIRST, None)))),
        (5, Mesh(pp=2, layers=(4, 1))),
        (6, Mesh(pp=2, chunks=2, fields=((FIRST, 2), (LAST, 4)))),
        (5, Mesh(pp=2, chunks=2, layers=(1, 2, 1, 1))),
        (5, Mesh(pp=3, fields=((FIRST, 1), (LAST, 2)), checkpointing=True)),
        (3, Mesh(pp=2, fields=(("account_for_loss_in_pipeline_split", True),))),
    ],
)
def test_stages_of_several_sizes(tmp_path: Path, num_layers: int, mesh: Mesh) -> None:
    compare(with_layers(tmp_path / "model", num_layers), mesh, FLOAT64)


def layers_here(ranks: Ranks, folder: str, mesh: Mesh) -> list[list[int]]:
    """In a rank: the layers that its stages say they have, from 0."""
    from references.megatron_cpu import use_cpu

    use_cpu()
    from references.megatron_ranks import megatron_engine

    stages = megatron_engine(ranks, folder, mesh)._parts.stages
    return [[layer.layer_number - 1 for layer in stage.decoder.layers] for stage in stages]


@pytest.mark.dist
def test_each_rank_has_the_layers_that_settings_give_it(tmp_path: Path) -> None:
    """Tokens pass stage 0 of both ranks, and then stage 1 of both."""
    mesh = Mesh(pp=2, chunks=2, fields=((FIRST, 2), (LAST, 4)))
    folder = with_layers(tmp_path / "model", 6)
    assert run_ranks(layers_here, 2, str(folder), mesh, timeout_s=200) == [[[0], [3]], [[1, 2], [4, 5]]]


@pytest.mark.dist
def test_expert_parallel(tiny_folder: Folder) -> None:
    compare(tiny_folder("qwen3_moe"), Mesh(dp=2, ep=2), ROUTED)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("qwen3", Mesh(tp=2, pp=2, checkpointing=True)),
        ("qwen3", Mesh(tp=2, dp=2, distributed=True, dtype="float32")),
        ("llama", Mesh(pp=2, dp=2, distributed=True, dtype="float32")),
        ("qwen3_moe", Mesh(tp=2, dp=2, ep=2)),
        ("qwen3_moe", Mesh(pp=2, dp=2, ep=2)),
    ],
)
def test_four_ranks(tiny_folder: Folder, kind: str, mesh: Mesh) -> None:
    exact = FLOAT64 if mesh.ep == 1 else ROUTED
    compare(tiny_folder(kind), mesh, exact if mesh.dtype == "float64" else FLOAT32)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("qwen3", Mesh(cp=2)),
        ("llama", Mesh(cp=2, tp=2)),
        ("qwen3", Mesh(cp=2, pp=2)),
        ("qwen3_moe", Mesh(cp=2, ep=2)),
    ],
)
def test_context_parallel(tiny_folder: Folder, kind: str, mesh: Mesh) -> None:
    compare(tiny_folder(kind), mesh, FLOAT64 if mesh.ep == 1 else ROUTED)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(),
        pytest.param(Mesh(tp=2), marks=pytest.mark.dist),
        pytest.param(Mesh(pp=2), marks=pytest.mark.dist),
        pytest.param(Mesh(cp=2), marks=pytest.mark.dist),
        pytest.param(Mesh(tp=2, pp=2, checkpointing=True), marks=pytest.mark.dist),
        pytest.param(Mesh(tp=2, dp=2, distributed=True, dtype="float32"), marks=pytest.mark.dist),
    ],
)
def test_value_models(value_folder: Path, mesh: Mesh) -> None:
    compare(value_folder, mesh, FLOAT64 if mesh.dtype == "float64" else FLOAT32, values=True)


@pytest.mark.dist
def test_a_policy_with_one_embedding_for_both_ends_becomes_a_value_model(tiny_folder: Folder) -> None:
    """Its head is new and no copy of the embedding: values of 0, whose gradient reaches the head alone."""
    compare(tiny_folder("qwen2"), Mesh(pp=2), FLOAT64, values=True)


def poisoned(ranks: Ranks, folder: str, mesh: Mesh) -> tuple[str, bool, float]:
    """In a rank: a loss that is no number, and a step behind it."""
    from references.megatron_cpu import use_cpu

    use_cpu()
    from references.megatron_ranks import megatron_engine
    from references.token_passes import of_log_probs

    engine = megatron_engine(ranks, folder, mesh)
    before = engine.checksum()
    rows = make_rows([torch.tensor(PAIRS[0][0])], [torch.tensor(PAIRS[0][1])])
    engine.accumulate(rows, of_log_probs(lambda log_probs, *_: (log_probs / 0).sum() * 0, temperature=1.0))
    skipped = engine.step().skipped
    unchanged = engine.checksum() == before
    engine.accumulate(rows, of_log_probs(lambda log_probs, *_: log_probs.sum(), temperature=1.0))
    return skipped, unchanged, engine.step().grad_norm


def fields_of_the_class(ranks: Ranks) -> set[str]:
    """In a process that has megatron-core anyway."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return {field.name for field in dataclasses.fields(TransformerConfig)}


def test_the_fields_that_settings_may_name_are_those_of_the_class() -> None:
    assert run_ranks(fields_of_the_class, 1) == [transformer_fields()]


@pytest.mark.dist
def test_a_poisoned_gradient_is_skipped_and_named_on_all_stages(tiny_folder: Folder) -> None:
    results = run_ranks(poisoned, 2, str(tiny_folder("llama")), Mesh(pp=2), timeout_s=200)
    for skipped, unchanged, norm in results:
        assert "gradient norm is nan (non-finite in model.embed_tokens.weight and 20 more)" in skipped
        assert unchanged
        assert norm == results[0][2] > 0
