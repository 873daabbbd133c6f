"""The curve: points land where their step and value say."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.observability.reward_curve import Series, run_series, save_curve, text_curve


def plot_rows(text: str) -> list[str]:
    """The cells of the plot, without legend and axes."""
    return [re.split("[┤│]", line, maxsplit=1)[1] for line in text.splitlines()[1:-2]]


def test_a_straight_line_climbs_one_row_per_column() -> None:
    # 11 steps on 11 columns and 11 rows, values 0 to 1: the diagonal, drawn with a corner at each climb.
    series = Series(name="reward", steps=tuple(range(11)), values=tuple(i / 10 for i in range(11)))
    rows = plot_rows(text_curve([series], width=11, height=11))
    assert rows[10] == "─╯"
    for row in range(1, 10):
        assert rows[row] == " " * (10 - row) + "╭╯"
    assert rows[0] == " " * 10 + "╭"


def test_a_fall_is_drawn_with_the_other_corners() -> None:
    series = Series(name="reward", steps=tuple(range(10)), values=(1.0,) * 5 + (0.0,) * 5)
    rows = plot_rows(text_curve([series], width=10, height=3))
    assert rows == ["─────╮", "     │", "     ╰────"]


def test_marks_sit_on_their_points_and_the_axes_name_the_range() -> None:
    series = Series(name="pass rate", steps=(0, 50, 100), values=(0.0, 0.5, 1.0), is_line=False)
    text = text_curve([series], width=21, height=5)
    assert plot_rows(text) == [" " * 20 + "●", "", " " * 10 + "●", "", "●"]
    lines = text.splitlines()
    assert lines[0].strip() == "● pass rate"
    assert [line[:9] for line in lines[1:6]] == [
        "      1 ┤",
        "        │",
        "    0.5 ┤",
        "        │",
        "      0 ┤",
    ]
    assert lines[-2] == "        └" + "─" * 21
    assert lines[-1] == "         0" + " " * 12 + "step 100"


def test_default_size_fits_a_terminal_of_80_columns() -> None:
    series = Series(
        name="reward", steps=tuple(range(1, 301)), values=tuple(math.sin(i / 20) for i in range(300))
    )
    lines = text_curve([series]).splitlines()
    assert len(lines) == 16
    assert max(map(len, lines)) == 69


def test_steps_of_one_column_are_averaged() -> None:
    # Values 0 and 1 take turns; each column holds ten of both, so the line is level at the middle.
    series = Series(name="r", steps=tuple(range(200)), values=(0.0, 1.0) * 100)
    rows = plot_rows(text_curve([series], width=10, height=11))
    assert [row for row, cells in enumerate(rows) if cells.strip()] == [5]


def test_points_that_are_not_finite_are_left_out() -> None:
    series = Series(name="r", steps=(1, 2, 3, 4), values=(math.nan, 0.5, math.inf, 0.5))
    assert series.points() == [(2, 0.5), (4, 0.5)]
    assert "─" * 10 in text_curve([series], width=10, height=3)
    nothing = Series(name="r", steps=(1,), values=(math.nan,))
    assert text_curve([nothing]) == "no points to draw yet"
    assert text_curve([]) == "no points to draw yet"


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.floats(-1e300, 1e300) | st.just(math.nan)),
        min_size=1,
        max_size=20,
    ),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_points_give_a_frame_of_the_asked_size(points: list[tuple[int, float]], is_line: bool) -> None:
    steps, values = zip(*points, strict=True)
    text = text_curve([Series(name="x", steps=steps, values=values, is_line=is_line)], width=30, height=7)
    if all(math.isnan(value) for value in values):
        assert text == "no points to draw yet"
        return
    rows = plot_rows(text)
    assert len(rows) == 7
    assert max(map(len, rows)) <= 30
    assert any(cells.strip() for cells in rows)


def test_rewards_of_validations_are_no_pass_rates() -> None:
    """Also where a source's `acc` is there, or a reward above 1; in older runs `acc` was a reward too."""
    both = {"val-core/pass_rate": 0.5, "val-core/mean_reward": 1.25, "val-core/x/acc/mean@1": 0.25}
    (passed,) = run_series([{"step": 0, **both}, {"step": 1, **both}])
    assert (passed.name, passed.values) == ("pass rate", (0.5, 0.5))
    none = {"val-core/mean_reward": 0.5, "val-core/x/acc/mean@1": 0.25}
    (reward,) = run_series([{"step": 0, **both}, {"step": 1, **none}])
    assert (reward.name, reward.values) == ("mean reward of validation", (1.25, 0.5))
    older = [{"step": 0, "val-core/x/acc/mean@1": 1.02, "val-core/x/reward/mean@1": 1.02}]
    assert [one.name for one in run_series(older)] == ["mean reward of validation"]


def test_run_series_takes_reward_and_pass_rate_from_metrics() -> None:
    metrics = [
        {"step": 0, "val-core/gsm8k/acc/mean@1": 0.25},
        {"step": 1, "critic/rewards/mean": 0.5, "critic/score/mean": 9.0},
        {"step": 2, "critic/rewards/mean": 0.75, "val-core/gsm8k/acc/mean@1": 0.5},
    ]
    reward, passed = run_series(metrics)
    assert reward == Series(name="reward", steps=(1, 2), values=(0.5, 0.75))
    assert passed == Series(name="pass rate", steps=(0, 2), values=(0.25, 0.5), is_line=False)
    assert run_series([{"step": 1, "actor/lr": 1.0}]) == []


def test_png_holds_a_picture_that_depends_on_the_points(tmp_path: Path) -> None:
    flat = Series(name="reward", steps=(1, 2), values=(0.5, 0.5))
    steep = Series(name="reward", steps=(1, 2), values=(0.5, 0.9))
    first = save_curve(tmp_path / "new" / "a.png", [flat], title="run").read_bytes()
    second = save_curve(tmp_path / "b.png", [steep], title="run").read_bytes()
    assert first[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(first[16:20], "big"), int.from_bytes(first[20:24], "big")
    assert (width, height) == (960, 480)
    assert first != second
    assert save_curve(tmp_path / "empty.png", [], title="run").stat().st_size > 0


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="series 'r' has 2 steps and 1 values"):
        Series(name="r", steps=(1, 2), values=(1.0,))
    with pytest.raises(ValueError, match="a curve of 5 x 2 cannot be read"):
        text_curve([], width=5, height=2)


def test_the_value_axis_ends_at_round_numbers() -> None:
    series = Series(name="reward", steps=(0, 1), values=(0.229, 0.414))
    labels = re.findall(r"(\S+) ┤", text_curve([series], width=10, height=5))
    assert labels == ["0.45", "0.325", "0.2"]
