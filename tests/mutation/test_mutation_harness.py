"""The harness of mutation testing: which changes it makes, which it leaves out, and what its numbers count."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="make mutation installs what the harness needs")

import run
from mutants import mutants_of

SOURCE = '''"""A text with 1 < 2 in it."""

if TYPE_CHECKING:
    from pathlib import Path
BOUND: float = 2.5


def clip(value: int | None, low: float = 0.0, *, up: bool = False) -> float | None:
    """Between 1 < low and 3."""
    if value is None or value < low:
        raise ValueError(f"{value - 1} is below {low}")
    return max(value, low).to(None, non_blocking=True).detach()
'''


def listed(folder: Path) -> dict[str, str]:
    return {mutant.key: text for mutant, text in mutants_of(_written(folder), folder)}


def _written(folder: Path) -> Path:
    path = folder / "clip.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_changes_of_a_small_module(tmp_path: Path) -> None:
    changes = {key.split("::", 1)[1].partition(": ")[::2] for key in listed(tmp_path)}
    made = {(place, change.partition("  ->  ")[2]) for place, change in changes}
    condition = "if value is None or value < low:"
    signature = "def clip(value: int | None, low: float = 0.0, *, up: bool = False) -> float | None:"
    assert made == {
        ("::Number", "BOUND: float = 3.5"),
        ("::Number", "BOUND: float = 1.5"),
        ("clip::Number", signature.replace("0.0", "1.0")),
        ("clip::Number", signature.replace("0.0", "-1.0")),
        ("clip::False_True", signature.replace("False", "True")),
        ("clip::Is_IsNot", condition.replace("is None", "is not None")),
        ("clip::Or_And", condition.replace(" or ", " and ")),
        ("clip::Lt_LtE", condition.replace("<", "<=")),
        ("clip::Lt_GtE", condition.replace("<", ">=")),
        ("clip::NegateCondition", "if not (value is None or value < low):"),
        ("clip::DeleteStatement", "pass"),
        ("clip::OppositeName", "return min(value, low).to(None, non_blocking=True).detach()"),
        ("clip::KeepGradient", "return max(value, low).to(None, non_blocking=True).contiguous()"),
        ("clip::ReturnNone", "return None"),
    }


def test_each_change_is_one_line_of_code(tmp_path: Path) -> None:
    for key, text in listed(tmp_path).items():
        assert text.count("\n") == SOURCE.count("\n"), key
        assert sum(a != b for a, b in zip(text.splitlines(), SOURCE.splitlines(), strict=True)) == 1, key


def test_a_module_that_only_declares_is_tried_on_every_test(tmp_path: Path) -> None:
    (mutant, _), *_ = mutants_of(_written(tmp_path), tmp_path)
    seconds = {"a::one": 1.0, "b::two": 0.5, "b::three": 0.1}
    lines = {"clip": {"6": ["(import)"]}, "other": {"1": list(seconds)}}
    declared = run.TestChoice({"seconds": seconds, "failed": [], "lines": lines}, budget=30.0)
    assert [test for test, _ in declared.of_module(mutant)] == ["b::three", "b::two", "a::one"]
    lines["clip"]["9"] = ["b::two"]
    executed = run.TestChoice({"seconds": seconds, "failed": [], "lines": lines}, budget=30.0)
    assert [test for test, _ in executed.of_module(mutant)] == ["b::three", "b::two"], (
        "those of the same file"
    )


def test_a_score_leaves_out_explained_survivors_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "equivalents", lambda: {"kl::f::a": "same number", "kl::f::b": "same number"})
    outcomes = {"kl::f::a": "survived", "kl::f::b": "killed", "kl::f::c": "survived", "kl::f::d": "timeout"}
    got = run.summary([{"key": key, "outcome": what, "seconds": 1.0} for key, what in outcomes.items()])
    # b and d were seen; a is explained, so two of three count: 66.67 %, and 2 of all 4: 50 %.
    assert (got["score"], got["raw_score"], got["total"], got["seconds"]) == (66.67, 50.0, 4, 4.0)
    assert got["per_module"]["kl"]["equivalent"] == 1


def test_every_explained_change_has_a_reason() -> None:
    assert all(len(reason) > 20 for reason in run.equivalents().values())
