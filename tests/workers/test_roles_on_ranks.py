"""Actor, critic and reference on several ranks: the same numbers and the same weights as in one process.

In float64 and to 1e-10: what differs is the order in which sums are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from actor_batches import make_actor, random_batch, totals_of
from critic_batches import make_critic, value_batch
from numpy.typing import NDArray
from prm_batches import make_prm, outcome_batch, prm_ref
from torch.distributed.tensor import DTensor

from references.rank_processes import Ranks, run_ranks
from strop.algorithms.config import AlgorithmConfig
from strop.controller import Mesh, Placement, Worker, placed
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig
from strop.engines.training import TrainEngine
from strop.protocol import DataProto, columns
from strop.utils.metrics import Reduction, merge_metrics, metric_values
from strop.workers.config import ReferenceConfig
from strop.workers.reference import ReferenceWorker

Arrays = dict[str, NDArray[np.float64]]
Cut = list[list[int]]

WHOLE: Cut = [[0, 1, 2, 3, 4, 5, 6]]
CUTS: list[Cut] = [
    [[0, 1, 2, 3], [4, 5, 6]],
    [[6, 2, 0], [5, 1, 4, 3]],  # samples of a prompt on different ranks, in another order
    [[], [3, 0, 1, 2, 6, 5, 4]],  # a rank without rows
    [[2, 4], [0, 1, 3, 5, 6]],  # a rank whose rows need no gradient
]
POLICY = AlgorithmConfig(loss_agg_mode="seq-mean-token-mean")
EVERY_TERM = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3", entropy_coeff=0.02)
PER_RESPONSE = AlgorithmConfig(policy_loss="gspo")
WHOLE_BATCH = AlgorithmConfig(
    policy_loss="clip_cov", loss_settings={"clip_cov_lb": -9.0, "clip_cov_ub": 9.0, "clip_cov_ratio": 0.4}
)
"""Its choice of tokens is made over all ranks."""
VALUES = AlgorithmConfig(cliprange_value=0.2)


@dataclass(frozen=True)
class Seen:
    """What a rank, or one process, saw of a role."""

    metrics: list[dict[str, Reduction]]
    """Of each update."""
    weights: Arrays
    """After the last one."""
    rows: Arrays
    """Flat token columns of the rank's rows before the first one."""
    checksum: str


@contextmanager
def standing(ranks: Ranks, sp: int = 1) -> Iterator[int]:
    """Workers made inside are those of this rank; gives the number of its rows' part."""
    placement = Placement(
        rank=ranks.rank,
        mesh=Mesh(dp=ranks.world_size // sp, sp=sp),
        rendezvous=ranks.rendezvous,
    )
    with placed(placement):
        yield placement.mesh.dp_rank(ranks.rank)


def weights_of(engine: TrainEngine) -> Arrays:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy()
        for name, p in engine.model.named_parameters()
    }


def flat_columns(*batches: DataProto) -> Arrays:
    return {
        name: columns.flat(column).numpy() for batch in batches for name, column in batch.tensors().items()
    }


def actor_run(
    model: Path, algorithm: AlgorithmConfig, rows: list[int], sp: int = 1, lora: LoraConfig | None = None
) -> Seen:
    """Two updates of the policy on these rows of the batch."""
    actor = make_actor(model, algorithm, max_tokens=20, sequence_parallel=sp, lora=lora)
    batch = random_batch()
    own, totals = batch.select_idxs(rows), totals_of(batch)
    seen = [actor.compute_log_prob(own)]
    results = [actor.update_policy(own, totals) for _ in range(2)]
    seen.append(results[0].batch)
    if lora is not None:
        seen.append(actor.compute_ref_log_prob(own))
    metrics = [update.metrics for result in results for update in result.metrics]
    return Seen(metrics, weights_of(actor.engine), flat_columns(*seen), actor.checksum())


def adapter_run(model: Path, algorithm: AlgorithmConfig, rows: list[int], sp: int = 1) -> Seen:
    """The same for a policy that trains an adapter."""
    return actor_run(model, algorithm, rows, sp, LoraConfig(rank=4, alpha=8.0))


def critic_run(model: Path, algorithm: AlgorithmConfig, rows: list[int], sp: int = 1) -> Seen:
    """Two updates of the critic on these rows of the batch."""
    critic = make_critic(model, algorithm, max_tokens=20, sequence_parallel=sp)
    batch = value_batch()
    own, totals = batch.select_idxs(rows), totals_of(batch)
    results = [critic.update_critic(own, totals) for _ in range(2)]
    metrics = [result.metrics for result in results]
    seen = flat_columns(critic.compute_values(own))
    return Seen(metrics, weights_of(critic.engine), seen, critic.checksum())


def prm_run(model: Path, algorithm: AlgorithmConfig, rows: list[int], sp: int = 1) -> Seen:
    """Two updates of the process reward model on these rows of the batch."""
    prm = make_prm(model, max_tokens=20, sequence_parallel=sp)
    batch = outcome_batch()
    batch = batch.union(prm_ref(batch, model))
    own, totals = batch.select_idxs(rows), totals_of(batch)
    before = prm.compute_prm_ref_log_prob(own)
    metrics = [prm.update_prm(own, totals).metrics for _ in range(2)]
    seen = flat_columns(before, prm.compute_process_rewards(own))
    return Seen(metrics, weights_of(prm.engine), seen, prm.checksum())


RUNS = {"actor": actor_run, "adapter": adapter_run, "critic": critic_run, "prm": prm_run}


def on_rank(
    ranks: Ranks, role: str, model: str, algorithm: AlgorithmConfig, cuts: list[Cut], sp: int
) -> list[Seen]:
    """One run for each cut of the batch."""
    with standing(ranks, sp) as part:
        return [RUNS[role](Path(model), algorithm, cut[part], sp) for cut in cuts]


def assert_equal_to_one(cut: Cut, alone: Seen, together: Sequence[Seen]) -> None:
    """`together`: what the reporting rank of each part saw."""
    exact = {"rtol": 1e-10, "atol": 1e-10}
    for number, numbers in enumerate(alone.metrics):
        merged = metric_values(merge_metrics(seen.metrics[number] for seen in together))
        assert merged == pytest.approx(metric_values(numbers), rel=1e-9, abs=1e-9)
    for seen in together:
        assert seen.checksum == together[0].checksum
        for name, weight in alone.weights.items():
            np.testing.assert_allclose(seen.weights[name], weight, **exact, err_msg=name)
    lengths = columns.row_lengths(random_batch().tensors()["responses"]).tolist()
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    for part, seen in zip(cut, together, strict=True):
        for name, whole in alone.rows.items():
            expected = [whole[starts[row] : starts[row] + lengths[row]] for row in part]
            flat = np.concatenate([np.zeros(0), *expected])
            np.testing.assert_allclose(seen.rows[name], flat, **exact, err_msg=name)


@pytest.mark.parametrize(
    ("role", "algorithm"),
    [
        ("actor", POLICY),
        ("actor", EVERY_TERM),
        pytest.param("actor", PER_RESPONSE, marks=pytest.mark.slow),
        pytest.param("actor", WHOLE_BATCH, marks=pytest.mark.slow),
        pytest.param("adapter", EVERY_TERM, marks=pytest.mark.slow),
        ("critic", VALUES),
        pytest.param("prm", POLICY, marks=pytest.mark.slow),
    ],
    ids=["policy", "every term", "per response", "whole batch", "adapter", "critic", "prm"],
)
def test_two_ranks_equal_one_process_for_any_cut(
    tiny_model: Path, role: str, algorithm: AlgorithmConfig
) -> None:
    alone = RUNS[role](tiny_model, algorithm, WHOLE[0])
    first, second = run_ranks(on_rank, 2, role, str(tiny_model), algorithm, CUTS, 1, timeout_s=240)
    for cut, *together in zip(CUTS, first, second, strict=True):
        assert_equal_to_one(cut, alone, together)


@pytest.mark.parametrize(
    ("role", "algorithm"),
    [("actor", EVERY_TERM), ("critic", VALUES), pytest.param("prm", POLICY, marks=pytest.mark.slow)],
)
def test_sequence_parallel_ranks_equal_one_process(
    tiny_model: Path, role: str, algorithm: AlgorithmConfig
) -> None:
    alone = RUNS[role](tiny_model, algorithm, WHOLE[0])
    first, second = run_ranks(on_rank, 2, role, str(tiny_model), algorithm, [WHOLE], 2, timeout_s=240)
    assert_equal_to_one(WHOLE, alone, first)
    assert_equal_to_one(WHOLE, alone, second)


@pytest.mark.dist
@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize(("role", "algorithm"), [("actor", EVERY_TERM), ("critic", VALUES)])
def test_four_ranks_equal_one_process(
    tiny_model: Path, role: str, algorithm: AlgorithmConfig, sp: int
) -> None:
    alone = RUNS[role](tiny_model, algorithm, WHOLE[0])
    cut = [[0, 4], [1], [], [6, 3, 5, 2]] if sp == 1 else [[0, 4, 1], [6, 3, 5, 2]]
    seen = run_ranks(on_rank, 4, role, str(tiny_model), algorithm, [cut], sp, timeout_s=280)
    assert_equal_to_one(cut, alone, [one for (one,) in seen[::sp]])


def save_on_rank(ranks: Ranks, model: str, folder: str) -> list[str]:
    """One update each, and the state of both roles in a folder."""
    checksums = []
    with standing(ranks) as part:
        batch, rows = value_batch(), CUTS[0][part]
        actor, critic = make_actor(Path(model), POLICY), make_critic(Path(model), VALUES)
        actor.update_policy(batch.select_idxs(rows), totals_of(batch))
        critic.update_critic(batch.select_idxs(rows), totals_of(batch))
        for role in (actor, critic):
            role.save_checkpoint(Path(folder))
            checksums.append(role.checksum())
    return checksums


def test_roles_saved_by_two_ranks_continue_in_one_process(tiny_model: Path, tmp_path: Path) -> None:
    first, second = run_ranks(save_on_rank, 2, str(tiny_model), str(tmp_path), timeout_s=240)
    actor = make_actor(tiny_model, POLICY, checkpoint=tmp_path)
    critic = make_critic(tiny_model, VALUES, checkpoint=tmp_path)
    assert [actor.checksum(), critic.checksum()] == first == second
    assert actor.engine.optimizer.num_steps == critic.engine.optimizer.num_steps == 1


def reference_log_probs(ranks: Ranks, model: str, cut: Cut) -> list[list[float]]:
    with standing(ranks) as part:
        worker = ReferenceWorker(
            ModelConfig(path=model, dtype="float64"),
            ReferenceConfig(engine=EngineConfig(max_tokens_per_device=20)),
            device="cpu",
        )
    own = random_batch().select_idxs(cut[part])
    return [row.tolist() for row in columns.rows(worker.compute_ref_log_prob(own).tensors()["ref_log_prob"])]


def test_the_reference_on_two_ranks_equals_one_process(tiny_model: Path) -> None:
    (alone,) = [reference_log_probs(Ranks(0, 1, 0), str(tiny_model), WHOLE)]
    cut = [[5, 1, 0, 2, 6, 4, 3], []]  # a rank without rows still takes part in every forward pass
    together = run_ranks(reference_log_probs, 2, str(tiny_model), cut)
    for rows, part in zip(together, cut, strict=True):
        for row, seen in zip(part, rows, strict=True):
            assert seen == pytest.approx(alone[row], rel=1e-10)


def test_a_mesh_that_the_engine_does_not_have_is_refused(tiny_model: Path) -> None:
    with (
        placed(Placement(mesh=Mesh(sp=2), role="actor")),
        pytest.raises(
            ValueError, match=r"role 'actor' has the mesh .*sp=2.* say Mesh\(dp=..., tp=1, sp=1, cp=1, pp=1\)"
        ),
    ):
        make_actor(tiny_model, POLICY)
    with (
        placed(Placement(mesh=Mesh(pp=2), role="actor")),
        pytest.raises(
            ValueError, match=r"role 'actor' has the mesh .*pp=2.* say Mesh\(dp=..., tp=1, sp=1, cp=1, pp=1\)"
        ),
    ):
        make_actor(tiny_model, POLICY)


def test_a_worker_alone_needs_no_processes(tiny_model: Path) -> None:
    actor: Worker = make_actor(tiny_model, POLICY)
    assert (actor.world_size, actor.dp_rank) == (1, 0)
    assert not torch.distributed.is_initialized()
