"""Prompts whose answers were long are begun first."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ray_runs import cut_after
from tiny_runs import Project, resume_in, train_in

from strop.data.visit_ids import visit_uid
from strop.protocol.trajectory import Prompt
from strop.run import CheckpointError
from strop.trainer.collectors.lengths import Lengths
from strop.workers.reports import EpisodeReport

LONG = ["data.max_response_tokens=30", "rollout.stop_token_ids=[40,41,42,43,44,45]", "data.val_files=[]"]
TWO_EPOCHS = ["data.max_train_prompts=8", "trainer.max_steps=4", "rollout.deterministic=true"]


def prompt(row: int) -> Prompt:
    return Prompt(
        uid=visit_uid(1, row), row=row, token_ids=(1,), messages=(), data_source="x", ground_truth=""
    )


def report(row: int, tokens: int, index: int = 0) -> EpisodeReport:
    return EpisodeReport(
        uid=visit_uid(0, row),
        sample_index=index,
        data_source="x",
        num_prompt_tokens=1,
        num_sampled_tokens=tokens,
    )


def rows(prompts: list[Prompt]) -> list[int]:
    return [one.row for one in prompts]


def test_each_rank_begins_with_its_longest() -> None:
    lengths = Lengths()
    lengths.record([report(0, 10), report(0, 30, 1), report(1, 50), report(2, 5), report(3, 40)])
    prompts = [prompt(row) for row in range(4)]
    assert rows(lengths.longest_first(prompts, ranks=1)) == [1, 3, 0, 2], "50, 40, mean of 10 and 30, 5"
    assert rows(lengths.longest_first(prompts, ranks=2)) == [1, 0, 3, 2], "50 and 20; 40 and 5"
    lengths.record([report(1, 1)])
    assert rows(lengths.longest_first(prompts, ranks=1)) == [3, 0, 2, 1], "the last visit counts"


def test_what_was_never_visited_counts_as_the_mean() -> None:
    lengths = Lengths()
    assert rows(lengths.longest_first([prompt(2), prompt(1)], ranks=1)) == [2, 1], (
        "nothing is known: as they come"
    )
    lengths.record([report(0, 10), report(1, 30)])
    assert rows(lengths.longest_first([prompt(0), prompt(5), prompt(1)], ranks=1)) == [1, 5, 0]


@given(
    st.dictionaries(st.integers(0, 30), st.integers(0, 99)), st.sets(st.integers(0, 30)), st.integers(1, 4)
)
def test_no_prompt_is_lost_or_doubled(known: dict[int, int], asked: set[int], ranks: int) -> None:
    lengths = Lengths()
    lengths.record([report(row, tokens) for row, tokens in known.items()])
    begun = rows(lengths.longest_first([prompt(row) for row in asked], ranks=ranks))
    assert sorted(begun) == sorted(asked)


def test_a_checkpoint_keeps_them_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    one, two = Lengths(), Lengths()
    one.record([report(0, 10), report(1, 30)])
    (tmp_path / Lengths.FILE).write_text(one.text())
    two.restore(tmp_path / Lengths.FILE)
    assert two.text() == one.text()
    two.restore(tmp_path / "nothing")
    (tmp_path / Lengths.FILE).write_text('{"0": "x"}')
    with pytest.raises(CheckpointError, match=r"lengths.json is damaged \(ValueError"):
        two.restore(tmp_path / Lengths.FILE)


@pytest.mark.usefixtures("engine_clock")
@pytest.mark.parametrize(
    "ahead",
    [[], ["rollout.over_issue=0.5"]],
)
@pytest.mark.slow
def test_runs_begin_with_the_long_ones_and_train_the_same_samples(
    project: Project, tmp_path: Path, ahead: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    order = Lengths.longest_first

    def watched(self: Lengths, prompts: list[Prompt], *, ranks: int) -> list[Prompt]:
        seen.append(rows(begun := list(order(self, prompts, ranks=ranks))))
        return begun

    monkeypatch.setattr(Lengths, "longest_first", watched)
    settings = [*LONG, *TWO_EPOCHS, *ahead]
    plain = train_in(tmp_path / "plain", project.config(*settings))
    drawn = list(seen) or [rows(list(record.prompts)) for record in plain.records]
    seen.clear()
    done = train_in(
        tmp_path / "run",
        project.config(*settings, "rollout.longest_first=true", "run.save_every=1", "run.keep_last=9"),
    )
    assert [sorted(one) for one in seen] == [sorted(one) for one in drawn] or ahead
    assert seen[-1] != drawn[-1], "in the second epoch they are in another order"
    if not ahead:
        assert [print_.chain for print_ in done.chain] == [print_.chain for print_ in plain.chain]
    rest = resume_in(cut_after(done.folder, tmp_path / "cut", step=2))
    assert [print_.chain for print_ in rest.chain] == [print_.chain for print_ in done.chain]
