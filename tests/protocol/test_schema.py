"""The table of columns: it agrees with itself, and with what a step really makes."""

from __future__ import annotations

from typing import get_args

import pytest

from strop.protocol.schema import COLUMNS, STAGES, Maker, labels_for, made_by, stage_columns, taken_by


def test_every_stage_of_the_hash_chain_has_columns_and_every_column_a_stage_that_is_known() -> None:
    assert all(stage_columns(stage) for stage in STAGES)
    assert {column.stage for column in COLUMNS.values()} - {""} == set(STAGES)
    assert stage_columns("log_probs") == ["rollout_log_probs", "log_probs"]


def test_whoever_takes_columns_gets_those_that_are_there_in_the_order_of_the_table() -> None:
    present = {"rm_scores", "token_level_scores", "prompts", "advantages"}
    assert taken_by("resampling", present) == ["token_level_scores", "rm_scores"]
    sampler = ["prompts", "token_level_scores", "rm_scores", "advantages"]
    assert taken_by("sampler", present) == sampler
    assert labels_for("sampler") == ["uid", "id"]


@pytest.mark.parametrize("maker", get_args(Maker))
def test_every_stage_makes_something(maker: Maker) -> None:
    assert made_by(maker)
