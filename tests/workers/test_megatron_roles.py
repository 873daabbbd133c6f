"""Roles on the Megatron engine, which runs cannot show well: numbers and weights of the torch engine in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from actor_batches import totals_of
from prm_batches import make_prm, outcome_batch, prm_ref
from torch import Tensor
from torch.testing import assert_close

from references.megatron_in_workers import IS_INSTALLED
from references.own_ranks import own_ranks
from references.rank_processes import Ranks, run_ranks
from strop.controller import Mesh, Placement, placed
from strop.data.tiny_model import make_tiny_model
from strop.protocol import DataProto, columns
from strop.utils.metrics import metric_values

__all__ = ["own_ranks"]  # the fixture

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not IS_INSTALLED, reason="megatron-core is not installed"),
]


@pytest.fixture(scope="module")
def two_key_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_key_heads") / "model"
    make_tiny_model(
        folder, seed=0, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    return folder


def trained_prm(
    model: Path, rows: DataProto, **engine: Any
) -> tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Tensor]]:
    """Two updates of the process reward model: their metrics, its token columns and its weights."""
    prm = make_prm(model, max_tokens=20, **engine)
    seen = dict(prm.compute_prm_ref_log_prob(rows).tensors())
    metrics = [metric_values(prm.update_prm(rows, totals_of(rows)).metrics) for _ in range(2)]
    seen |= prm.compute_process_rewards(rows).tensors()
    weights = prm.engine.streamed_weights() or prm.engine.model.named_parameters()
    return (
        metrics,
        {name: columns.flat(column) for name, column in seen.items()},
        {name: weight.detach().clone() for name, weight in weights},
    )


def trained_prm_on_rank(ranks: Ranks, model: str, rows: DataProto, tp: int, pp: int) -> Any:
    """In a rank."""
    from references.megatron_cpu import use_cpu

    use_cpu()
    placement = Placement(rank=ranks.rank, mesh=Mesh(tp=tp, pp=pp), rendezvous=ranks.rendezvous)
    with placed(placement):
        return trained_prm(Path(model), rows, kind="megatron", tensor_parallel=tp, pipeline_parallel=pp)


@pytest.mark.usefixtures("float64_norms")
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_process_reward_model_is_that_of_the_torch_engine(two_key_heads: Path, tp: int, pp: int) -> None:
    batch = outcome_batch()
    rows = batch.union(prm_ref(batch, two_key_heads))  # about a nat off what the model says
    metrics, seen, weights = trained_prm(two_key_heads, rows)
    results = run_ranks(trained_prm_on_rank, 2, str(two_key_heads), rows, tp, pp, timeout_s=240)
    reporting = results[Mesh(tp=tp, pp=pp).output_ranks()[0]][0]
    for ours, expected in zip(reporting, metrics, strict=True):
        assert ours == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert metrics[0]["prm/loss"] != pytest.approx(metrics[1]["prm/loss"], rel=1e-3)
    for _, ours, kept in results:
        assert ours.keys() == seen.keys() == {"prm_ref_log_prob", "process_rewards"}
        for name, column in seen.items():
            assert_close(ours[name], column, rtol=1e-9, atol=1e-9)
        for name, weight in weights.items():
            assert_close(kept[name], weight, rtol=1e-9, atol=1e-9)
