"""Columns that roles add to the rows of a step: each by one call, in the order of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from strop.algorithms.config import AlgorithmConfig
from strop.controller import InlineWorkerGroup, Mesh, Placement, Worker, placed
from strop.controller.dispatch import Dispatch
from strop.controller.registration import register
from strop.protocol import DataProto
from strop.protocol.schema import COLUMNS, ColumnStage, made_by
from strop.trainer.config import Config
from strop.trainer.role_columns import add_columns
from strop.trainer.rollout_batch import RolloutBatch
from strop.trainer.timing import Stages

NUM_ROWS = 3
STAGES = get_args(ColumnStage)
OF_ROLES = [name for name in STAGES if name not in ("rollout", "adv", "update_actor")]


class AnyRole(Worker):
    """Gives a column of its stage for every call, and notes the order of calls."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def _column(self, data: DataProto, stage: ColumnStage) -> DataProto:
        self.log.append(stage)
        names = sorted(made_by(stage) - {"num_trained"})
        columns = {name: torch.zeros(len(data)) for name in names}
        if stage == "correction":
            columns["num_trained"] = torch.tensor([4, 0, 2])
        return DataProto.from_dict(columns, meta_info={"numbers": {}} if stage == "correction" else {})


def _call(stage: ColumnStage) -> Any:
    def method(self: AnyRole, data: DataProto) -> DataProto:
        return self._column(data, stage)

    return register(dispatch_mode=Dispatch.DP_GATHER_PROTO, blocking=False)(method)


CALLS: dict[str, ColumnStage] = {
    "compute_rm_score": "reward_model",
    "compute_log_prob": "old_log_prob",
    "correct_rollout": "correction",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
    "compute_prm_ref_log_prob": "prm_ref",
    "compute_process_rewards": "prm",
    "compute_teacher": "teacher",
}
for name, stage in CALLS.items():
    setattr(AnyRole, name, _call(stage))


def role_group(log: list[str]) -> InlineWorkerGroup[AnyRole]:
    with placed(Placement(rank=0, mesh=Mesh(dp=1))):
        return InlineWorkerGroup([AnyRole(log)], Mesh(dp=1))


def roles(log: list[str], **missing: None) -> Any:
    names = ("actor", "reference", "critic", "teacher", "prm", "reward_model")
    return SimpleNamespace(**{**{name: role_group(log) for name in names}, **missing})


def rows() -> RolloutBatch:
    return RolloutBatch(
        rows=DataProto.from_dict(
            {}, non_tensors={name: [name] * NUM_ROWS for name in ("uid", "id", "episode_id")}
        ),
        reports=(),
    )


def config() -> Any:
    algorithm = AlgorithmConfig()
    return SimpleNamespace(needs=lambda column: True, algorithm=algorithm)


def test_every_column_has_a_call_and_they_come_in_the_order_of_a_step() -> None:
    log: list[str] = []
    groups, stages = roles(log), Stages()
    wanted = {name for name in COLUMNS if COLUMNS[name].made_by in OF_ROLES}
    batch = add_columns(rows(), wanted, config(), groups, stages)
    assert log == list(stages.seconds) == OF_ROLES
    assert batch.num_trained == (4, 0, 2)
    assert {"old_log_probs", "sum_pi_squared", "values"} <= batch.column_names
    add_columns(batch, {"old_log_probs", "values"}, config(), groups, stages)
    assert log == OF_ROLES, "what a batch has is not made again"


def test_without_a_reference_the_policy_without_its_adapter_is_asked() -> None:
    of_actor: list[str] = []
    of_others: list[str] = []
    groups = roles(of_others)
    groups.actor = role_group(of_actor)
    add_columns(rows(), {"ref_log_prob"}, config(), groups, Stages())
    assert (of_actor, of_others) == ([], ["ref"])
    groups.reference = None
    add_columns(rows(), {"ref_log_prob"}, config(), groups, Stages())
    assert (of_actor, of_others) == (["ref"], ["ref"])


@pytest.mark.parametrize(
    ("role", "column"),
    [
        ("reward_model", "rm_scores"),
        ("critic", "values"),
        ("prm", "prm_ref_log_prob"),
        ("prm", "process_rewards"),
        ("teacher", "teacher_log_prob"),
    ],
)
def test_a_column_of_a_role_that_the_run_has_not_is_refused_by_name(role: str, column: str) -> None:
    with pytest.raises(ValueError, match=f"this run has no {role}, so there is nobody to compute"):
        add_columns(rows(), {column}, config(), roles([], **{role: None}), Stages())


def test_the_roles_of_a_run_follow_from_its_settings() -> None:
    assert Config().roles == ("actor", "rollout")
    gae = Config(algorithm=AlgorithmConfig(adv_estimator="gae", use_kl_loss=True))
    assert gae.roles == ("actor", "rollout", "critic", "reference")
    assert set(gae.used_engines) == {"actor", "critic", "reference"}
