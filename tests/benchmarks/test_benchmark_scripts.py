"""Scripts of benchmarks/: help, the line that they print, and the arithmetic of growth."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from benchmark_modules import BENCHMARKS, benchmark_module
from fork_server import run_program

SIDES = {"real_trl", "rollout_sides", "trl_grpo", "workloads"}
"""Processes that benchmarks start, some in environments of other libraries."""
SCRIPTS = sorted(
    path
    for path in BENCHMARKS.glob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8") and path.stem not in SIDES
)
ASK = """\
import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    sys.path.insert(0, path.rpartition("/")[0])
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        print("ended", path, end.code)
    else:
        print("worked", path)
"""


def test_every_benchmark_answers_help() -> None:
    done = run_program(["-c", ASK, *SCRIPTS])
    ended = [line for line in done.stdout.splitlines() if line.startswith(("ended", "worked"))]
    assert ended == [f"ended {path} 0" for path in SCRIPTS], done.stderr[-2000:]
    assert done.stdout.count("usage: ") == len(SCRIPTS)


UNKNOWN = """\
import runpy, sys
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("script", "option"), [("update", "--shapes"), ("plan", "--cases")])
def test_a_name_that_there_is_not_is_refused_before_anything_is_measured(script: str, option: str) -> None:
    done = run_program(["-c", UNKNOWN, BENCHMARKS / f"{script}.py", option, "nonsense"])
    assert done.returncode == 2
    assert f"argument {option}: there is no 'nonsense'; choose from" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_object_that_a_benchmark_prints_is_one_line(script: Any) -> None:
    text = script.read_text(encoding="utf-8")
    assert "json.dumps(" in text
    assert "indent=" not in text


def test_growth_is_the_exponent_of_a_power_law() -> None:
    fit = benchmark_module("scale").fit
    exact = fit([(1, 3.0), (2, 12.0), (4, 48.0)])
    assert (exact["exponent"], exact["residual"]) == (2.0, 0.0)
    # In powers of 2: places 0, 1, 2 and heights 0, 1, 3 have the slope 1.5 and are +1/6, -1/3, +1/6 off the line.
    uneven = fit([(1, 1.0), (2, 2.0), (4, 8.0)])
    assert uneven["exponent"] == 1.5
    assert uneven["residual"] == pytest.approx(1 - 2 ** (-1 / 3), abs=1e-3)
    with pytest.raises(ValueError, match="a growth needs two sizes"):
        fit([(4, 1.0), (4, 2.0)])


def test_the_share_of_the_controller_follows_the_straight_line() -> None:
    scale = benchmark_module("scale")
    # 20 ms and 5 ms for each worker: 340 ms at 64.
    share = scale.controller_share({"ms_at_64_workers": 340.0, "ms_per_worker": 5.0})
    assert share["share_by_workers"]["1"] == pytest.approx(0.025 / scale.STEP_S, abs=1e-4)
    assert share["share_by_workers"]["64"] == pytest.approx(0.34 / scale.STEP_S, abs=1e-4)
    assert list(share["share_by_workers"]) == ["1", "2", "4", "8", "16", "32", "64"]


def test_the_picture_has_a_point_for_every_size() -> None:
    picture = benchmark_module("scale_picture").picture
    grown = {"update": {"rows <apart>": [(1, 1.0), (2, 2.0), (4, 4.0)], "ranks": [(1, 1.0), (2, 1.0)]}}
    fitted = {"update": {"rows <apart>": {"exponent": 1.0}, "ranks": {"exponent": 0.0}}}
    root = ElementTree.fromstring(picture(grown, fitted))
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert (names.count("circle"), names.count("line"), names.count("g")) == (5, 2, 2)
    first = [element for element in root.iter() if element.tag.endswith("circle")][:3]
    line = next(element for element in root.iter() if element.tag.endswith("line"))
    # Proportional growth: the points lie on the line, from its one end to the other.
    ends = [(line.get("x1"), line.get("y1")), (line.get("x2"), line.get("y2"))]
    assert [(circle.get("cx"), circle.get("cy")) for circle in (first[0], first[2])] == ends


def test_seconds_to_a_rate_are_those_of_all_steps_up_to_the_first_one_there() -> None:
    real = benchmark_module("real")
    steps = {"seconds": [5.0, 2.0, 4.0, 3.0], "rates": [0.1, 0.5, 0.9, 0.8], "lengths": [9.0, 4.0, 6.0, 5.0]}
    figures = {"step_s": 3.0, "mean_response_tokens": 5.0, "seconds_to_rate": 11.0}
    assert real.summary(steps, 0.85, 4) == {**figures, **steps}
    assert real.summary(steps, 0.95, 4)["seconds_to_rate"] is None


def test_real_models_are_compared_over_the_steps_that_both_made() -> None:
    compare = benchmark_module("real").comparison
    # Steps 2 and 3 of both: 2 s beside 5 s, answers of 5 tokens beside 5.4; what follows on one side is slower.
    ours = {"seconds": [9.0, 1.0, 3.0, 50.0], "rates": [0.0] * 4, "lengths": [8.0, 5.0, 5.0, 1.0]}
    theirs = {"seconds": [9.0, 4.0, 6.0], "rates": [0.0, 0.0, 0.9], "lengths": [2.0, 5.4, 5.4]}
    line = compare(ours, theirs, 0.85)
    assert (line["ratio_trl"], line["steps_compared"], line["is_equal_work"]) == (2.5, 2, True)
    assert (line["strop"]["seconds_to_rate"], line["trl"]["seconds_to_rate"]) == (None, 19.0)
    assert not compare(ours, {**theirs, "lengths": [2.0, 5.6, 5.6]}, 0.85)["is_equal_work"]
