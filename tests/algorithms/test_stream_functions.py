"""A user's own filters and reward shaping: what they are given, and what may come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.group_functions import (
    SHAPING_COLUMNS,
    SampleGroup,
    register_filter,
    register_reward_shaping,
)
from strop.algorithms.group_functions.calls import filter_cause, shaped_rewards
from strop.algorithms.registry import FILTERS, REWARD_SHAPINGS, check_settings, load_extensions
from strop.rewards.outcome import Outcome
from strop.workers.reports import EpisodeReport
from strop.workers.reward_shaping import sample_groups, shaped_by_group

GROUP = SampleGroup(
    uid="e0-7",
    data_source="sums",
    rewards=(1.0, 0.5),
    accuracies=(1.0, 0.0),
    parts=({"style": 0.25}, {}),
    response_lengths=(3, 9),
    num_turns=(1, 2),
    stop_reasons=("stop", "length"),
)


@pytest.fixture(autouse=True)
def _scratch() -> Iterator[None]:
    held = [(one, dict(one), dict(one.declarations)) for one in (FILTERS, REWARD_SHAPINGS)]
    yield
    for registry, functions, declarations in held:
        registry.clear()
        registry.update(functions)  # type: ignore[arg-type]
        registry.declarations.clear()
        registry.declarations.update(declarations)


def cause(verdict: object) -> str:
    register_filter("mine")(lambda group: verdict)
    return filter_cause("mine", GROUP)


@pytest.mark.parametrize(
    ("verdict", "wanted"),
    [
        (True, ""),
        (np.bool_(True), ""),
        (False, "filter mine"),
        (np.bool_(False), "filter mine"),
        (" too easy ", "too easy"),
    ],
)
def test_verdicts_of_a_filter(verdict: object, wanted: str) -> None:
    assert cause(verdict) == wanted


@pytest.mark.parametrize(
    ("verdict", "described"),
    [
        (None, "returned None for prompt e0-7"),
        (" " * 70, f"returned '{' ' * 59} for prompt e0-7"),
        ("  ", "returned '  ' for prompt e0-7"),
        (1, "returned a int for"),
        ([True, False], "returned a list of 2 for"),
        (torch.ones(2), r"returned a Tensor of shape \[2\] for"),
        (np.array([math.inf]), r"returned a ndarray of shape \[1\] with values that are not finite for"),
    ],
)
def test_verdicts_that_are_none(verdict: object, described: str) -> None:
    with pytest.raises(
        ValueError, match=rf"filter 'mine': .*lambda> {described}.* returns True to keep the group"
    ):
        cause(verdict)


def shaped(function: Callable[..., object], **settings: object) -> list[float]:
    register_reward_shaping("mine")(function)
    return shaped_rewards("mine", GROUP, [1.5, -0.5], max_response_tokens=9, settings=settings)


def test_a_shaping_function_gets_what_it_has_parameters_for() -> None:
    seen: dict[str, Any] = {}

    def everything(
        *,
        rewards: torch.Tensor,
        scores: torch.Tensor,
        accuracies: torch.Tensor,
        response_lengths: torch.Tensor,
        num_turns: torch.Tensor,
        stop_reasons: tuple[str, ...],
        parts: tuple[dict[str, float], ...],
        data_source: str,
        max_response_tokens: int,
        factor: float = 1.0,
    ) -> torch.Tensor:
        seen.update(locals())
        assert not torch.is_grad_enabled()
        return factor * rewards

    assert shaped(everything, factor=2.0) == [3.0, -1.0]
    seen.pop("seen", None)
    assert {name: value.dtype for name, value in seen.items() if isinstance(value, torch.Tensor)} == {
        "rewards": torch.float64,
        "scores": torch.float64,
        "accuracies": torch.float64,
        "response_lengths": torch.int64,
        "num_turns": torch.int64,
    }
    plain = {
        name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in seen.items()
    }
    assert plain == {
        "rewards": [1.5, -0.5],
        "scores": [1.0, 0.5],
        "accuracies": [1.0, 0.0],
        "response_lengths": [3, 9],
        "num_turns": [1, 2],
        "stop_reasons": ("stop", "length"),
        "parts": ({"style": 0.25}, {}),
        "data_source": "sums",
        "max_response_tokens": 9,
        "factor": 2.0,
    }
    assert set(plain) - {"factor"} == set(SHAPING_COLUMNS)


@pytest.mark.parametrize(
    "result", [[1, 2.0], (1, 2), np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([1, 2])]
)
def test_one_number_per_sample_in_any_form(result: object) -> None:
    got = shaped(lambda rewards: result)
    assert got == [1.0, 2.0]
    assert all(type(number) is float for number in got)


@pytest.mark.parametrize(
    ("result", "described"),
    [
        (None, "returned None for prompt e0-7"),
        ("x" * 70, f"returned '{'x' * 59} for prompt e0-7"),
        (1.0, "returned a float for"),
        ("no", "returned 'no' for"),
        ([1.0], "returned a list of 1 for"),
        ([1.0, 2.0, 3.0], "returned a list of 3 for"),
        ((1.0, True), "returned a tuple of 2 for"),
        ([1.0, "2"], "returned a list of 2 for"),
        ([1.0, math.nan], "returned a list of 2 for"),
        (torch.ones(1, 2), r"returned a Tensor of shape \[1, 2\] for"),
        (torch.ones(3), r"returned a Tensor of shape \[3\] for"),
        (
            torch.tensor([1.0, math.inf]),
            r"returned a Tensor of shape \[2\] with values that are not finite for",
        ),
        (np.array(1.0), r"returned a ndarray of shape \[\] for"),
    ],
)
def test_results_that_are_no_rewards(result: object, described: str) -> None:
    with pytest.raises(
        ValueError, match=rf"reward shaping 'mine': .*lambda> {described}.*prompt's 2 samples"
    ):
        shaped(lambda rewards: result)


def test_what_nobody_gives_is_refused_when_the_function_is_registered() -> None:
    def wants_more(rewards: torch.Tensor, entropy: float, share: float) -> torch.Tensor:
        return rewards

    with pytest.raises(
        ValueError, match="wants_more requires entropy, share, which nobody gives it; there are rewards"
    ):
        register_reward_shaping("mine")(wants_more)
    assert "mine" not in REWARD_SHAPINGS

    def open_ended(rewards: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        assert not args
        assert not kwargs
        return rewards

    assert shaped(open_ended) == [1.5, -0.5]


def test_settings_of_a_shaping_function_are_its_defaults() -> None:
    def scaled(rewards: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return rewards * factor

    assert register_reward_shaping("scaled")(scaled) is scaled
    check_settings("reward shaping", "scaled", REWARD_SHAPINGS.declaration("scaled"), {"factor": 2.0})
    with pytest.raises(
        ValueError, match="reward shaping 'scaled' has no setting 'facto'; did you mean 'factor'"
    ):
        check_settings("reward shaping", "scaled", REWARD_SHAPINGS.declaration("scaled"), {"facto": 2.0})
    with pytest.raises(ValueError, match="unknown reward shaping 'other'; known: .*scaled"):
        REWARD_SHAPINGS.declaration("other")


@pytest.mark.parametrize("registry", [FILTERS, REWARD_SHAPINGS])
def test_a_name_belongs_to_one_function(registry: Any) -> None:
    register = register_filter if registry is FILTERS else register_reward_shaping
    register("mine")(lambda rewards: rewards)
    with pytest.raises(ValueError, match="'mine' is already registered by"):
        register("mine")(lambda rewards: rewards)


def test_groups_are_told_apart_by_their_uid() -> None:
    register_filter("mine")(lambda group: 3)
    with pytest.raises(ValueError, match="for prompt e1-2, but a filter"):
        filter_cause("mine", replace(GROUP, uid="e1-2"))


# ----------------------------------------------------------------------------------------------- files


def test_a_file_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "count.txt").write_text("")
    file = tmp_path / "once.py"
    file.write_text(
        "from pathlib import Path\nwith Path('count.txt').open('a') as out:\n    out.write('x')\n"
    )
    monkeypatch.chdir(tmp_path)
    load_extensions(["once.py", str(file)])
    load_extensions([str(file)])
    assert (tmp_path / "count.txt").read_text() == "x"
    (tmp_path / "other.py").write_text(file.read_text())
    load_extensions([str(file), "other.py"])  # what is known does not end the list
    assert (tmp_path / "count.txt").read_text() == "xx"


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"algorithm.extensions names '.*missing.py', but .*missing.py is no file"
    ):
        load_extensions([str(tmp_path / "missing.py")])
    with pytest.raises(ValueError, match="is no file"):
        load_extensions([str(tmp_path)])
    (tmp_path / "notes.txt").write_text("x = 1")
    with pytest.raises(ValueError, match=r"notes.txt', which is no Python file \(.py\)"):
        load_extensions([str(tmp_path / "notes.txt")])


def test_a_file_that_fails_may_be_mended(tmp_path: Path) -> None:
    file = tmp_path / "mended.py"
    file.write_text("raise KeyError('oops')\n")
    with pytest.raises(ValueError, match="mended.py cannot be imported: KeyError: 'oops'") as error:
        load_extensions([str(file)])
    assert isinstance(error.value.__cause__, KeyError)
    # A file of another length, so that no cache of the old one is taken for it.
    file.write_text("import sys\nNAME = __name__\nassert sys.modules[NAME]\n")
    load_extensions([str(file)])


def report(uid: str, index: int, score: float | None, **parts: float) -> EpisodeReport:
    outcome = None if score is None else Outcome(kind="score", score=score, parts=parts)
    return EpisodeReport(
        uid=uid,
        sample_index=index,
        data_source="sums",
        num_prompt_tokens=2,
        num_response_tokens=5 + index,
        num_sampled_tokens=3,
        num_turns=1 + index,
        stop_reason="stop" if index else "length",
        outcome=outcome,
    )


REPORTS = [
    report("e0-1", 0, 1.0, acc=0.25),
    report("e0-2", 0, None),
    report("e0-1", 1, 0.5),
    report("e0-1", 2, None),
]


def test_samples_of_a_prompt_are_a_group_without_those_that_have_no_reward() -> None:
    first, second = sample_groups(REPORTS)
    assert first == SampleGroup(
        uid="e0-1",
        data_source="sums",
        rewards=(1.0, 0.5),
        accuracies=(0.25, 0.5),
        parts=({"acc": 0.25}, {}),
        response_lengths=(5, 6),
        num_turns=(1, 2),
        stop_reasons=("length", "stop"),
    )
    assert (second.uid, second.rewards) == ("e0-2", ())


def test_shaping_changes_what_samples_are_trained_with() -> None:
    def brief(rewards: torch.Tensor, max_response_tokens: int, factor: float = 1.0) -> torch.Tensor:
        return rewards * factor + max_response_tokens

    register_reward_shaping("brief")(brief)
    algorithm = AlgorithmConfig(reward_shaping="brief", shaping_settings={"factor": 2.0})
    shaped = shaped_by_group(algorithm, REPORTS, {"e0-1/0": 0.5, "e0-1/1": 0.25}, 10)
    assert shaped == {"e0-1/0": 11.0, "e0-1/1": 10.5}
