"""The columns of a training batch, declared once: type and axes of each, the stage that makes it, and its consumers.

Axes: B rows (training sequences), P~ and R~ the prompt and response tokens of each row (jagged), T~ both but the last
one, K a number of its own.
What an estimator or a loss of its own reads is declared with it (`needs`); this table says where it comes from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Axes = Literal["B", "B P~", "B R~", "B R~ K", "B T~ K", "B K"]
ColumnStage = Literal[
    "rollout", "reward_model", "old_log_prob", "correction", "ref", "values", "prm_ref", "prm", "adv",
    "teacher", "update_actor",
]  # fmt: skip
"""The stage of a step that makes a column; timing_s/ has it under this name (that of rollout is gen)."""
Consumer = Literal["advantages", "resampling", "sampler", "preflight"]
"""Consumers that get only the columns that they read; roles with a model and the summary of a step get every column."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column."""

    name: str
    dtype: torch.dtype | None
    """None: objects."""
    axes: Axes
    made_by: ColumnStage
    consumers: frozenset[Consumer] = frozenset()
    stage: str = ""
    """The stage of the hash chain that its bits belong to."""


def _column(
    name: str,
    dtype: torch.dtype | None,
    axes: Axes,
    made_by: ColumnStage,
    *consumers: Consumer,
    stage: str = "",
) -> Column:
    return Column(
        name=name, dtype=dtype, axes=axes, made_by=made_by, consumers=frozenset(consumers), stage=stage
    )


_F32, _I64, _BOOL = torch.float32, torch.int64, torch.bool

COLUMNS: Mapping[str, Column] = {
    column.name: column
    for column in (
        _column("uid", None, "B", "rollout", "advantages", "resampling", "sampler"),
        _column("id", None, "B", "rollout", "advantages", "resampling", "sampler"),
        _column("episode_id", None, "B", "rollout", "advantages", "resampling"),
        _column("media", None, "B", "rollout"),
        _column("raw_prompt", None, "B", "rollout"),
        _column("response_text", None, "B", "rollout"),
        _column("prompts", _I64, "B P~", "rollout", "sampler", stage="prompt_tokens"),
        _column("responses", _I64, "B R~", "rollout", "sampler", "preflight", stage="sampled_tokens"),
        _column(
            "response_mask",
            _BOOL,
            "B R~",
            "rollout",
            "advantages",
            "sampler",
            "preflight",
            stage="sampled_tokens",
        ),
        _column("rollout_log_probs", _F32, "B R~", "rollout", "advantages", "preflight", stage="log_probs"),
        _column(
            "token_level_scores", _F32, "B R~", "rollout", "advantages", "resampling", "sampler", "preflight"
        ),
        _column("routed_experts", torch.int16, "B T~ K", "rollout"),
        _column("reward_parts", _F32, "B K", "rollout", "advantages", "preflight"),
        _column("reward_baselines", _F32, "B", "rollout", "advantages"),
        _column("sample_index", _I64, "B", "rollout", "advantages"),
        _column("turn_index", _I64, "B", "rollout", "advantages"),
        _column("turn_rewards", torch.float64, "B", "rollout", "advantages"),
        _column("anchor_ids", _I64, "B", "rollout", "advantages"),
        _column("rm_cut_tokens", _I64, "B", "reward_model"),
        _column("rm_scores", _F32, "B", "reward_model", "advantages", "resampling", "sampler", "preflight"),
        _column("old_log_probs", _F32, "B R~", "old_log_prob", "advantages", "preflight"),
        _column("entropys", _F32, "B R~", "old_log_prob"),
        _column("sum_pi_squared", _F32, "B R~", "old_log_prob", "advantages"),
        _column("loss_mask", _BOOL, "B R~", "correction", "advantages", stage="correction"),
        _column("rollout_is_weights", _F32, "B R~", "correction", "advantages", stage="correction"),
        _column("num_trained", _I64, "B", "correction"),
        _column("ref_log_prob", _F32, "B R~", "ref", "advantages", stage="ref_log_probs"),
        _column("values", _F32, "B R~", "values", "advantages", stage="values"),
        _column("prm_ref_log_prob", _F32, "B R~", "prm_ref"),
        _column("process_rewards", _F32, "B R~", "prm", "advantages", stage="process_rewards"),
        _column("token_level_rewards", _F32, "B R~", "adv", "sampler", stage="rewards"),
        _column("advantages", _F32, "B R~", "adv", "sampler", stage="advantages"),
        _column("returns", _F32, "B R~", "adv", "sampler", stage="advantages"),
        _column("teacher_log_prob", _F32, "B R~", "teacher"),
        _column("teacher_ids", torch.int32, "B R~ K", "teacher"),
        _column("teacher_logprobs", _F32, "B R~ K", "teacher"),
        _column("log_probs", _F32, "B R~", "update_actor", stage="log_probs"),
    )
}
"""By name."""

STAGES = (
    "prompt_tokens", "sampled_tokens", "log_probs", "ref_log_probs", "values", "process_rewards", "correction",
    "rewards", "advantages",
)  # fmt: skip
"""Of the hash chain, in the order in which a step has them."""


def made_by(stage: ColumnStage) -> frozenset[str]:
    """The tensor columns that a stage can make."""
    return frozenset(
        name for name, column in COLUMNS.items() if column.made_by == stage and column.dtype is not None
    )


def columns_for(consumer: Consumer, present: Collection[str]) -> list[str]:
    """The tensor columns, of those that are present, that a consumer reads."""
    return [
        name
        for name, column in COLUMNS.items()
        if name in present and consumer in column.consumers and column.dtype is not None
    ]


def object_columns_for(consumer: Consumer) -> list[str]:
    """The columns of objects that a consumer reads."""
    return [name for name, column in COLUMNS.items() if consumer in column.consumers and column.dtype is None]


def stage_columns(stage: str) -> list[str]:
    """The columns whose bits stand for a stage of the hash chain, in order."""
    return [name for name, column in COLUMNS.items() if column.stage == stage]
