from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from strop.protocol.trajectory import Prompt, Trajectory


def start() -> Trajectory:
    return Trajectory(uid="e0-000017", sample_index=2, prompt_ids=(5, 6))


def test_turns_append_ids_provenance_log_probs_and_versions_together() -> None:
    first_turn = start().with_sampled([7, 8], [-0.5, -1.0], [3, 4])
    trajectory = first_turn.with_given([9]).with_sampled([1], [0.0], [4])
    assert trajectory.response_ids == (7, 8, 9, 1)
    assert trajectory.sampled == (True, True, False, True)
    assert trajectory.log_probs == (-0.5, -1.0, 0.0, 0.0)
    assert trajectory.versions == (3, 4, -1, 4)
    assert trajectory.token_ids == (5, 6, 7, 8, 9, 1)
    assert trajectory.id == "e0-000017/2"


def test_appending_leaves_the_earlier_trajectory_as_it_was() -> None:
    first = start().with_sampled([7], [-0.5], [0])
    first.with_given([9])
    assert first.response_ids == (7,)


def test_lengths_are_checked_once_when_tokens_are_appended() -> None:
    with pytest.raises(ValueError, match=r"/2 has 2 response_ids, 2 sampled, 1 log_probs, 2 versions"):
        start().with_sampled([7, 8], [-0.5], [0, 0])


def test_a_finished_trajectory_accepts_no_more_tokens() -> None:
    done = start().with_sampled([7], [-0.5], [0]).finish("length")
    assert done.is_finished
    assert done.stop_reason == "length"
    assert not start().is_finished
    with pytest.raises(ValueError, match="ended with 'length'"):
        done.with_given([1])
    with pytest.raises(ValueError, match="ended with 'length'"):
        done.finish("stop")
    with pytest.raises(ValueError, match="needs a stop reason"):
        start().finish("unfinished")


@pytest.mark.parametrize(("log_prob", "version"), [(float("nan"), 0), (float("-inf"), 0), (-1.0, -1)])
def test_a_sampled_token_needs_a_finite_log_prob_and_a_version(log_prob: float, version: int) -> None:
    with pytest.raises(ValueError, match="sampled at response position 1"):
        start().with_sampled([7, 8], [-0.5, log_prob], [0, version])


def test_a_log_prob_that_is_no_number_tells_of_the_weights() -> None:
    with pytest.raises(ValueError, match=r"log-prob nan by version 3 of the weights, .*actor\.optim\.lr"):
        start().with_sampled([7], [float("nan")], [3])


def test_a_given_token_carries_no_log_prob_and_no_version() -> None:
    with pytest.raises(ValueError, match="given its token at response position 0"):
        Trajectory(
            uid="u",
            sample_index=0,
            prompt_ids=(1,),
            response_ids=(2,),
            sampled=(False,),
            log_probs=(-0.1,),
            versions=(-1,),
        )


class Counted:
    """A log-prob that counts how often somebody reads it."""

    def __init__(self, value: float) -> None:
        self.value, self.reads = value, 0

    def __float__(self) -> float:
        self.reads += 1
        return self.value


def test_every_token_is_checked_once_however_often_the_record_is_copied() -> None:
    log_probs = [Counted(-0.5) for _ in range(6)]
    trajectory = start().with_sampled([7, 8], log_probs[:2], [0, 0]).with_given([9])  # type: ignore[arg-type]
    trajectory = trajectory.with_sampled([1, 2, 3, 4], log_probs[2:], [1] * 4)  # type: ignore[arg-type]
    copied = pickle.loads(pickle.dumps(replace(trajectory.truncate(6), extra={"a": 1}).finish("length")))
    replace(copied, reward_score=1.0)
    assert [one.reads for one in log_probs] == [1] * 6
    assert [one.reads for one in copied.log_probs if isinstance(one, Counted)] == [1] * 5


def test_other_tokens_in_a_copy_are_checked() -> None:
    trajectory = start().with_sampled([7, 8], [-0.5, -1.0], [0, 0])
    for changes in (
        {"log_probs": (-0.5, float("nan"))},
        {"versions": (0, -1)},
        {"sampled": (True, False)},
    ):
        with pytest.raises(ValueError, match="response position 1"):
            replace(trajectory, **changes)


def test_a_trajectory_needs_a_prompt_and_an_index() -> None:
    with pytest.raises(ValueError, match="no prompt_ids"):
        Trajectory(uid="u", sample_index=0, prompt_ids=())
    with pytest.raises(ValueError, match="negative sample_index"):
        Trajectory(uid="u", sample_index=-1, prompt_ids=(1,))


def prompt(**changes: object) -> Prompt:
    fields: dict[str, object] = {
        "uid": "val-000001",
        "row": 1,
        "token_ids": (1, 2),
        "messages": ({"role": "user", "content": "2+2?"},),
        "data_source": "strop/exact",
        "ground_truth": "4",
    }
    return Prompt(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_prompt_has_a_uid_a_row_and_tokens() -> None:
    assert prompt().agent_name == "single_turn_agent"
    with pytest.raises(ValueError, match=r"val-000001 \(dataset row 1\) has no tokens"):
        prompt(token_ids=())
    with pytest.raises(ValueError, match="row 1 has an empty uid"):
        prompt(uid="")
    with pytest.raises(ValueError, match="row number -1"):
        prompt(row=-1)


def test_the_records_load_without_torch_and_numpy() -> None:
    code = "import strop.protocol.trajectory, sys; print(sorted({'torch', 'numpy', 'tensordict'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
