"""Whole runs in which generation is ahead of training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from test_ray_runs import RAY, cut_after
from tiny_runs import Done, Project, check_records, resume_in, train_in

from strop.config.errors import ConfigError
from strop.run import RunFolder
from strop.trainer.config import Config
from strop.workers.async_rollout.in_play import IN_PLAY, read_in_play

CORRECTED = ["algorithm.correction.weights=token", "trainer.max_steps=5"]
AHEAD = [*CORRECTED, "rollout.max_staleness=1", "data.max_response_tokens=8"]
FEW = ["rollout.max_running=6", "reward.num_workers=1"]
"""So few sequences at a time that some of a prompt's are in play when a step has enough."""
STILL = [
    "actor.optim.lr=1e-15",
    "data.max_response_tokens=30",
    "rollout.stop_token_ids=[40,41,42,43,44,45]",
    "data.val_files=[]",
]
"""Answers of different length, which depend on their prompt and number alone: next to nothing is learned."""


def trained(folder: Path) -> Counter[str]:
    """How often each sample was trained, by the records of the ledger."""
    with RunFolder.open(folder, read_only=True) as run:
        events = run.events.read("settled")
    return Counter(
        f"{uid}:{ranges}"
        for event in events
        for by_uid in event["fates"].get("trained", {}).values()
        for uid, ranges in by_uid.items()
    )


def check_bound(done: Done, bound: int) -> None:
    """No sample is older than the bound, some are old, and every prompt is trained once."""
    worst = []
    for record in done.records:
        for report in record.reports:
            oldest, newest = report.versions
            assert 0 <= record.step - 1 - newest <= record.step - 1 - oldest <= bound
            worst.append(record.step - 1 - oldest)
    assert max(worst) == bound, "generation was ahead"
    assert set(trained(done.folder).values()) == {1}
    for numbers, record in zip(done.steps, done.records, strict=True):
        ages = Counter(record.step - 1 - report.versions[0] for report in record.reports)
        for age, count in ages.items():
            assert numbers[f"training/off_policy/samples_by_staleness/{age}"] == count
        assert numbers["training/off_policy/trajectory_staleness_worst/max"] == max(ages)
        assert 0 <= numbers["fully_async/rollouter/idle_ratio"] <= 1
        assert 0 < numbers["fully_async/trainer/idle_ratio"] <= 1


def test_a_lead_of_nothing_is_the_synchronous_trainer(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector of runs ahead, held to a bound of 0: the same batches, tokens, losses and weights, to the bit."""
    config = project.config(*CORRECTED, "rollout.max_staleness=0")
    one = train_in(tmp_path / "one", config)
    monkeypatch.setattr(Config, "async_setting", "rollout.max_staleness")
    two = train_in(tmp_path / "two", config)
    assert two.records[0].collection_metrics["training/off_policy/prompts_ahead"] == 0, "it was this one"
    assert [print_.chain for print_ in one.chain] == [print_.chain for print_ in two.chain]


@pytest.mark.usefixtures("engine_clock")
def test_samples_are_at_most_so_many_versions_old_and_none_is_lost(project: Project, tmp_path: Path) -> None:
    done = train_in(tmp_path / "run", project.config(*AHEAD, *FEW))
    check_records(done.folder, num_steps=5)
    check_bound(done, 1)
    assert [len(record.reports) for record in done.records] == [16] * 5
    assert any(
        report.versions[0] < report.versions[1] for record in done.records for report in record.reports
    ), "one went on across new weights"
    ahead = [numbers["training/off_policy/prompts_ahead"] for numbers in done.steps]
    assert ahead == [4, 4, 4, 4, 0], "the last step leaves nothing behind"
    clipped = [numbers["rollout_corr/rollout_is_max"] for numbers in done.steps]
    assert max(clipped) > 1.001, "older samples are weighed"


@pytest.mark.usefixtures("engine_clock")
def test_tokens_are_recorded_under_the_version_that_sampled_them(project: Project, tmp_path: Path) -> None:
    """The weights of step 1 differ much from those before: the log-probs tell which one sampled a token."""
    done = train_in(tmp_path / "run", project.config(*AHEAD, *FEW, "trainer.max_steps=2"))
    spans = [
        row
        for row in RunFolder.open(done.folder, read_only=True).samples.read(2)
        if len(set(row["versions"]) - {-1}) > 1
    ]
    assert spans
    for row in spans:
        sampled = [
            version for version, chosen in zip(row["versions"], row["response_mask"], strict=True) if chosen
        ]
        assert sampled == sorted(sampled)


def test_several_versions_ahead_and_a_fraction_of_one(project: Project, tmp_path: Path) -> None:
    given = ["rollout.max_staleness=3", "algorithm.correction.weights=none"]
    three = train_in(tmp_path / "three", project.config(*AHEAD, *given))
    (line,) = [line for line in three.said if line.startswith("ahead: ")]
    assert line.startswith(
        "ahead: samples may be begun 3 versions before the policy that learns from them; the loss"
    )
    assert three.steps[0]["training/off_policy/prompts_ahead"] == 12
    check_bound(three, 3)
    half = train_in(tmp_path / "half", project.config(*AHEAD, *FEW, "rollout.max_staleness=0.5"))
    assert half.steps[0]["training/off_policy/prompts_ahead"] == 2
    check_bound(half, 1)


@pytest.mark.usefixtures("engine_clock")
def test_an_interrupted_run_goes_on_with_the_tokens_that_were_in_play(
    project: Project, tmp_path: Path
) -> None:
    config = project.config(*AHEAD, *FEW, "run.save_every=1", "run.keep_last=9")
    whole = train_in(tmp_path / "whole", config)
    folder = cut_after(whole.folder, tmp_path / "cut", step=1)
    rest = resume_in(folder)
    (line,) = [line for line in rest.said if "in play" in line]
    kept = read_in_play(folder / "checkpoints" / "global_step_1" / IN_PLAY)
    num_tokens = sum(len(note.token_ids) for one in kept.values() for note in one.kept.requests.values())
    assert num_tokens > 0
    num_scores = sum(len(one.kept.scores) for one in kept.values())
    had = f"{num_tokens} tokens and {num_scores} scores that they had"
    assert line == f"4 prompts that were in play go on, with {had}"
    assert [record.step for record in rest.records] == [2, 3, 4, 5]
    check_records(folder, num_steps=5)
    assert set(trained(folder).values()) == {1}
    assert trained(folder).keys() == trained(whole.folder).keys(), "the same prompts, each once"
    with RunFolder.open(folder, read_only=True) as run:
        rows = {row["id"]: row for step in (2, 3, 4, 5) for row in run.samples.read(step)}
        assert not run.events.read("differing_request")
    for one in kept.values():
        assert one.version == 0
        for name, note in one.kept.requests.items():
            row, count = rows[name.partition("#")[0]], len(note.token_ids)
            assert row["response_ids"][:count] == list(note.token_ids)
            assert row["rollout_log_probs"][:count] == list(note.log_probs)
            assert row["versions"][:count] == list(note.versions)
            assert (len(row["response_ids"]) == count) == (note.stop_reason is not None)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [2, 0.5])
def test_interruptions_favour_no_length(project: Project, tmp_path: Path, bound: float) -> None:
    """By the clock on the wall: run after run, each interrupted after another step, trains the same samples, long and
    short ones."""
    saved = ["run.save_every=1", "run.keep_last=9", f"rollout.max_staleness={bound:g}"]
    whole = train_in(tmp_path / "whole", project.config(*AHEAD, *FEW, *STILL, *saved))
    expected = lengths(whole.folder)
    assert len(expected) == 5 * 16
    assert len(set(expected.values())) > 5, "they differ"
    folder = whole.folder
    for step in (1, 2, 3, 4):
        folder = cut_after(folder, tmp_path / f"cut-{step}", step=step)
        resume_in(folder)
        check_records(folder, num_steps=5)
        assert lengths(folder) == expected, step


def lengths(folder: Path) -> dict[str, int]:
    """By trained sample, its tokens."""
    with RunFolder.open(folder, read_only=True) as run:
        rows = [row for step in run.samples.steps() for row in run.samples.read(step)]
    return {row["id"]: len(row["response_ids"]) for row in rows if row["fate"] == "trained"}


def test_groups_that_cannot_teach_are_replaced_while_others_play(project: Project, tmp_path: Path) -> None:
    filtered = [
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=score",
        "data.val_files=[]",
    ]
    done = train_in(
        tmp_path / "run",
        project.config(*AHEAD, *FEW, *filtered, "rollout.samples_per_prompt=2", "trainer.max_steps=4"),
    )
    left_out = sum(numbers["training/filter_groups/evicted_samples"] for numbers in done.steps)
    assert left_out > 0, "some pairs had equal rewards"
    for record in done.records:
        assert len({report.uid for report in record.reports} - record.dropped.keys()) == 4
    check_records(done.folder, num_steps=4)


@pytest.mark.slow
def test_a_validation_in_between_leaves_what_is_in_play_alone(project: Project, tmp_path: Path) -> None:
    done = train_in(tmp_path / "run", project.config(*AHEAD, *FEW, "eval.every=1"))
    check_bound(done, 1)
    assert sum("val-core" in name for name in done.steps[0]) > 0


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ([], None),
        (["rollout.max_staleness=1"], "rollout"),
        (["rollout.max_staleness=0.5", "algorithm.correction.weights=token"], None),
        (["rollout.max_staleness=1", "algorithm.correction.reject={seq_mean_k3: 0.1}"], None),
        (["rollout.over_issue=0.5"], None),
    ],
)
def test_older_samples_are_corrected_for_where_nothing_is_said(
    project: Project, given: list[str], source: str | None
) -> None:
    assert project.config(*given).algorithm.old_log_probs == source


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ["algorithm.old_log_probs=recompute"],
            r"rollout.max_staleness is 1, so samples are older .* set algorithm.correction.weights=sequence",
        ),
        (["algorithm.policy_loss=reinforce"], "rollout.max_staleness is 1, so samples are older"),
        (["algorithm.policy_loss=gspo"], "rollout.max_staleness is 1, so samples are older"),
        (
            ["algorithm.correction.weights=token", "trainer.skip_rollout=x"],
            "recorded samples, which are all there at once: remove rollout.max_staleness",
        ),
        (
            ["algorithm.correction.weights=token", "algorithm.adv_estimator=remax"],
            "with a greedy answer of the",
        ),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(
    project: Project, given: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        project.config("rollout.max_staleness=1", *given)


@pytest.mark.dist
@pytest.mark.parametrize(
    "placed", [["resources.ranks=2"], ["resources.apart={rollout: 1}"], ["resources.apart={rollout: 2}"]]
)
def test_it_is_bounded_on_ray_with_generation_beside_the_trainer_and_apart(
    project: Project, tmp_path: Path, placed: list[str]
) -> None:
    config = project.config(*AHEAD, *FEW, *RAY, *placed, "run.save_every=1", "run.keep_last=9")
    done = train_in(tmp_path / "run", config)
    check_records(done.folder, num_steps=5)
    check_bound(done, 1)
    folder = cut_after(done.folder, tmp_path / "cut", step=3)
    rest = resume_in(folder)
    check_records(folder, num_steps=5)
    assert [record.step for record in rest.records] == [4, 5]
