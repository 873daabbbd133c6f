"""Groups that cannot teach, replaced while others are played: how many are begun, and what a run of that comes to."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ahead_runs import trained
from test_ray_runs import cut_after
from tiny_runs import Done, Project, check_records, resume_in, train_in
from virtual_clock import CLOCK_STEPS, Delays, Distribution, virtual_clock

from strop.algorithms.dynamic_sampling_config import FilterGroupsConfig
from strop.run import CheckpointError, RunFolder
from strop.trainer.collecting import TooFewGroups
from strop.trainer.collectors.dynamic_sampling import SURPLUS
from strop.trainer.collectors.pacing import StalenessBound
from strop.trainer.collectors.refill import FILE, Refill

HALF = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if zlib.crc32(ground_truth.encode()) % 2:
        return 0.5
    return zlib.crc32(solution_str.encode()) % 997 / 997
"""
"""All samples of every second prompt get the same; those of the others differ."""


def pace(size: int, bound: float, num_steps: int = 100) -> StalenessBound:
    return StalenessBound(groups_per_step=size, max_staleness=bound, num_steps=num_steps)


def test_so_many_are_begun_as_the_share_that_teaches_asks_for() -> None:
    one = pace(4, 0)
    assert one.capacity(1, 0, share=0.5, num_more=9) == 4, "as many as without a filter at once"
    # Two of the four cannot teach and are replaced, one can: three are needed, of one that is in play.
    assert one.capacity(1, 2, num_in_flight=1, share=0.5, num_more=9) == 3, "six, but four at once"
    # Three can, and one is needed: by a share of a half, two are in play.
    assert one.capacity(1, 3, num_in_flight=0, share=0.5, num_more=9) == 2
    assert one.capacity(1, 4, num_in_flight=1, share=0.5, num_more=9) == 1
    assert one.capacity(1, 5, num_in_flight=2, share=0.5, num_more=9) == 0
    assert one.capacity(1, 3, num_in_flight=0, share=0.1, num_more=9) == 4, "ten, but four at once"
    assert one.capacity(1, 3, num_in_flight=0, share=0.1, num_more=1) == 2, "one more than is needed"
    assert one.capacity(1, 3, num_in_flight=0, share=0.1, num_more=9, num_beyond=3) == 7
    assert one.capacity(1, 0, share=1.0, num_more=9, num_beyond=-3) == 1
    # One step ahead: eight at once. In step 2, three have ended and two are in play: five are needed of them.
    assert pace(4, 1).capacity(1, 0, share=0.5, num_more=9) == 8
    assert pace(4, 1).capacity(2, 4 + 3 + 2, num_in_flight=2, share=0.5, num_more=9) == 6


def test_what_is_beyond_the_room_of_a_step_is_chosen_by_when_it_was_begun() -> None:
    one, begun = pace(2, 0), dict.fromkeys("abcd", 0)
    assert one.must_train(1, begun) == {"a", "b"}
    assert one.select(1, begun, ["d", "c", "a"]) is None, "b may teach, and was begun before c"
    assert one.select(1, begun, ["d", "c", "a", "b"]) == ("a", "b")
    del begun["b"]  # it cannot
    assert one.select(1, begun, ["d", "c", "a"]) == ("a", "c")
    assert one.too_old(1, {"d": 0}) == ("d",)
    # One step ahead, five of that version have room for four: the last one waits for another to fail.
    one, begun = pace(2, 1), dict.fromkeys("abcde", 0)
    assert one.select(1, begun, ["e", "d"]) is None
    assert one.select(1, begun, ["e", "d", "b"]) == ("b", "d")
    assert one.too_old(1, {"a": 0, "c": 0, "e": 0}) == ()
    assert one.too_old(2, {"e": 0, "f": 1}) == ("e",)
    assert pace(2, 1, num_steps=2).too_old(2, {"e": 0, "f": 1}) == ("e", "f"), "no step comes after it"


def test_the_share_is_that_of_the_groups_of_late(tmp_path: Path) -> None:
    one = Refill(FilterGroupsConfig(enable=True), 4)
    assert (one.share, one.limit, one.num_beyond) == (1.0, 36, 0)
    for teaches in (True, False, False, False):
        one.record(teaches)
    assert one.share == 0.25
    one.end_step()
    for teaches in (True, True):
        one.record(teaches)
    assert one.share == (0.5 + 2) / (2 + 2), "those of the step before count half"
    one.num_unfilled = 3
    (tmp_path / FILE).write_text(one.state())
    again = Refill(FilterGroupsConfig(enable=True), 4)
    again.restore(tmp_path / FILE)
    assert (again.share, again.num_unfilled) == (one.share, 3)
    again.restore(tmp_path / "none")
    assert again.share == one.share
    for _ in range(99):
        again.record(False)
    assert again.share == 0.1, "never less"
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(CheckpointError, match="teaching_share.json is damaged"):
        again.restore(tmp_path / FILE)


def test_prompts_per_round_are_begun_at_once_and_bound_what_is_left_out() -> None:
    more = Refill(FilterGroupsConfig(enable=True, prompts_per_round=12, max_rounds=2), 4)
    assert (more.share, more.limit, more.num_beyond) == (1 / 3, 20, 8)
    assert pace(4, 0).capacity(1, 0, share=more.share, num_more=more.limit, num_beyond=more.num_beyond) == 12
    fewer = Refill(FilterGroupsConfig(enable=True, prompts_per_round=2, max_rounds=1), 4)
    assert (fewer.share, fewer.limit, fewer.num_beyond) == (1.0, 0, -2)
    assert pace(4, 0).capacity(1, 0, share=fewer.share, num_beyond=fewer.num_beyond) == 2


@given(
    size=st.integers(1, 4),
    bound=st.sampled_from([0, 0.25, 1, 1.5, 2]),
    num_steps=st.integers(1, 5),
    rate=st.sampled_from([0.2, 0.5, 0.9, 1.0]),
    per_round=st.sampled_from([None, 1, 3, 9]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=200, deadline=None)
def test_every_step_gets_its_groups_in_time_whatever_ends_first_and_can_teach(
    size: int, bound: float, num_steps: int, rate: float, per_round: int | None, seed: int
) -> None:
    rng, one = random.Random(seed), pace(size, bound, num_steps)
    replacing = Refill(FilterGroupsConfig(enable=True, max_rounds=10_000, prompts_per_round=per_round), size)
    names = (f"g{number}" for number in itertools.count())
    begun: dict[str, int] = {}
    ended: list[str] = []
    trained: list[str] = []

    for step in range(1, num_steps + 1):
        num_begun, left_out = (step - 1) * size + len(begun), 0
        while True:
            in_play = len(begun) - len(ended)
            room = one.capacity(
                step,
                num_begun,
                num_in_flight=in_play,
                share=replacing.share,
                num_more=replacing.limit - left_out,
                num_beyond=replacing.num_beyond,
            )
            begun |= {next(names): step - 1 for _ in range(room)}
            num_begun += room
            if room:
                at_once = max(size, per_round or 0) + math.ceil(bound * size)
                assert in_play + room <= at_once
            if (chosen := one.select(step, begun, ended)) is not None:
                break
            playing = [uid for uid in begun if uid not in ended]
            assert playing, "all have ended, and the step still waits"
            uid = rng.choice(playing)
            teaches = rng.random() < rate
            replacing.record(teaches)
            if teaches:
                ended.append(uid)
            else:
                del begun[uid]
                left_out += 1
                num_begun -= 1
        assert len(chosen) == size
        assert all(step - 1 - begun[uid] <= math.ceil(bound) for uid in chosen)
        trained += chosen
        surplus = one.too_old(step, {uid: v for uid, v in begun.items() if uid not in chosen})
        for uid in [*chosen, *surplus]:
            del begun[uid]
        ended = [uid for uid in ended if uid in begun]
        replacing.end_step()
    assert len(set(trained)) == len(trained) == num_steps * size
    assert not begun, "nothing is left behind"


@pytest.fixture
def half(project: Project, tmp_path: Path) -> Iterator[list[str]]:
    """Settings of runs in which half of the groups can teach; by a clock of engine steps, with delays."""
    (tmp_path / "half.py").write_text(HALF)
    settings = [
        f"reward.path='{tmp_path / 'half.py'}'", "data.val_files=[]", "data.prompts_per_step=8",
        "rollout.samples_per_prompt=2", "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score",
        "algorithm.correction.weights=token", "trainer.max_steps=4",
        "trainer.num_epochs=9",
    ]  # fmt: skip
    with virtual_clock(Delays(seed=0, latencies=Distribution(median=20.0, sigma=1.0))):
        yield settings


def check_books(done: Done, *, num_steps: int) -> None:
    """A constant batch, no fate is missing, and the metrics say what became of every sample."""
    check_records(done.folder, num_steps=num_steps)
    for record in done.records:
        assert record.learned is not None
        assert len({report.uid for report in record.learned.batch.reports}) == 8
    with RunFolder.open(done.folder, read_only=True) as run:
        counts = run.ledger.counts()
        settled = [event["fates"].get("filtered", {}) for event in run.events.read("settled")]
    assert counts["trained"] == num_steps * 16
    assert set(trained(done.folder).values()) == {1}
    names = {"evicted_samples": 0.0, "discarded_surplus_samples": 0.0}
    found = {name: sum(numbers[f"training/filter_groups/{name}"] for numbers in done.steps) for name in names}
    assert sum(found.values()) == counts["filtered"]
    surplus = sum(
        2 * len(by_uid) for fates in settled for reason, by_uid in fates.items() if reason == SURPLUS
    )
    assert found["discarded_surplus_samples"] == surplus


def clock_steps(done: Done) -> float:
    return sum(numbers[CLOCK_STEPS] for numbers in done.steps)


@pytest.mark.parametrize(
    ("leads", "num_steps"),
    [(("0", "1e-6"), 2), pytest.param(("0", "1e-6", "1"), 4, marks=pytest.mark.slow)],
)
def test_without_a_lead_it_takes_no_longer_than_rounds_and_with_one_less(
    project: Project, tmp_path: Path, half: list[str], leads: tuple[str, ...], num_steps: int
) -> None:
    took, looked_at = {}, {}
    for lead in leads:
        settings = [*half, f"rollout.max_staleness={lead}", f"trainer.max_steps={num_steps}"]
        done = train_in(tmp_path / lead, project.config(*settings))
        check_books(done, num_steps=num_steps)
        took[lead] = clock_steps(done)
        looked_at[lead] = sum(numbers["training/filter_groups/rounds"] for numbers in done.steps)
        ages = [report.versions[0] - record.step + 1 for record in done.records for report in record.reports]
        assert min(ages) >= -math.ceil(float(lead))
        early = [numbers["training/filter_groups/discarded_surplus_samples"] for numbers in done.steps][:-1]
        assert lead != "1e-6" or not any(early), "it is trained in the next step, where there is one"
    assert took["1e-6"] <= took["0"]
    assert took.get("1", 0) < took["1e-6"]
    assert looked_at["1e-6"] <= 1.25 * looked_at["0"], "not by playing many more"


SAVED = ["run.save_every=1", "run.keep_last=9"]
STREAMS = [
    pytest.param(["rollout.max_staleness=1"], (1, 2, 3), id="a lead"),
    pytest.param(["rollout.max_staleness=1e-6"], (1, 2, 3), id="none"),
    pytest.param(
        ["rollout.max_staleness=1e-6", "algorithm.filter_groups.prompts_per_round=20"],
        (1, 2, 3),
        id="surplus",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "steps"), STREAMS)
def test_a_run_that_is_interrupted_goes_on_as_the_one_that_was_not(
    project: Project, tmp_path: Path, half: list[str], stream: list[str], steps: tuple[int, ...]
) -> None:
    whole = train_in(tmp_path / "whole", project.config(*half, *SAVED, *stream))
    check_books(whole, num_steps=4)
    for step in steps:
        rest = resume_in(cut_after(whole.folder, tmp_path / f"cut-{step}", step=step))
        assert [one.chain for one in rest.chain] == [one.chain for one in whole.chain], step
        assert fates(rest.folder) == fates(whole.folder), step
        assert clock_steps(rest) == clock_steps(whole), step


def fates(folder: Path) -> Counter[tuple[int, str, str, str]]:
    """Of every prompt: step, fate, reason."""
    with RunFolder.open(folder, read_only=True) as run:
        return Counter(
            (event["step"], fate, reason, uid)
            for event in run.events.read("settled")
            for fate, by_reason in event["fates"].items()
            for reason, by_uid in by_reason.items()
            for uid in by_uid
        )


def test_what_teaches_beyond_a_step_is_left_out_in_the_order_of_its_begin(
    project: Project, tmp_path: Path, half: list[str]
) -> None:
    more = ["rollout.max_staleness=1e-6", "algorithm.filter_groups.prompts_per_round=24"]
    done = train_in(tmp_path / "run", project.config(*half, *more, "trainer.max_steps=1"))
    check_books(done, num_steps=1)
    [record], [numbers] = done.records, done.steps
    assert numbers["training/filter_groups/discarded_surplus_samples"] > 0
    assert numbers["training/filter_groups/discarded_surplus_tokens"] > 0
    with RunFolder.open(done.folder, read_only=True) as run:
        begun = [uid for event in run.events.read("issued") for uid in event["samples"]]
    assert len(begun) >= 24
    assert record.learned is not None
    kept = {report.uid for report in record.learned.batch.reports}
    last = max(begun.index(uid) for uid in kept)
    reasons = {uid: reason for _, _, reason, uid in fates(done.folder)}
    assert all(uid in kept or reasons[uid] == "equal rewards" for uid in begun[:last])
    assert {reasons[uid] for uid in begun[last + 1 :]} == {SURPLUS, "equal rewards"}


@pytest.mark.slow
def test_at_its_limit_a_stream_trains_on_what_there_is_or_stops(
    project: Project, tmp_path: Path, half: list[str]
) -> None:
    rare = [*half, "rollout.max_staleness=1", "algorithm.filter_groups.max_rounds=1"]
    done = train_in(tmp_path / "run", project.config(*rare))
    check_records(done.folder, num_steps=4)
    sizes = [len(record.learned.batch.reports) for record in done.records if record.learned is not None]
    assert 0 < min(sizes) < 16
    with RunFolder.open(done.folder, read_only=True) as run:
        assert run.ledger.counts()["issued"] <= (4 + 1) * 16
    with pytest.raises(TooFewGroups, match=r"\d groups could not teach before step 1 had its 8 \(\d equal"):
        train_in(tmp_path / "stops", project.config(*rare, "algorithm.filter_groups.at_limit=stop"))
