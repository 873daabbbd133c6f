"""The table of columns: it agrees with itself, and with what a step really makes."""

from __future__ import annotations

from typing import get_args

import pytest

from strop.protocol.schema import (
    COLUMNS,
    STAGES,
    ColumnStage,
    columns_for,
    made_by,
    object_columns_for,
    stage_columns,
)


def test_every_stage_of_the_hash_chain_has_columns_and_every_column_a_stage_that_is_known() -> None:
    assert all(stage_columns(stage) for stage in STAGES)
    assert {column.stage for column in COLUMNS.values()} - {""} == set(STAGES)
    assert stage_columns("log_probs") == ["rollout_log_probs", "log_probs"]


def test_whoever_takes_columns_gets_those_that_are_there_in_the_order_of_the_table() -> None:
    present = {"rm_scores", "token_level_scores", "prompts", "advantages"}
    assert columns_for("resampling", present) == ["token_level_scores", "rm_scores"]
    sampler = ["prompts", "token_level_scores", "rm_scores", "advantages"]
    assert columns_for("sampler", present) == sampler
    assert object_columns_for("sampler") == ["uid", "id"]


@pytest.mark.parametrize("maker", get_args(ColumnStage))
def test_every_stage_makes_something(maker: ColumnStage) -> None:
    assert made_by(maker)
