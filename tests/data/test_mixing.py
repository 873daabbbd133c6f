"""How often rows of a data source are visited."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data import DataConfig
from strop.data.mixture import (
    by_entry,
    check_source_weights,
    entry_names,
    visits_per_epoch,
    weighted_epochs,
    weights_of_sources,
)
from strop.data.sampler import PromptSampler
from strop.data.sft.config import SftDataConfig
from strop.data.visit_ids import visit_uid
from strop.run.paths import with_absolute_paths

SOURCES = {0: "a", 1: "a", 2: "b", 5: "b", 7: "b", 8: "c"}


def test_weights_of_whole_numbers_are_exact_in_every_epoch() -> None:
    for epoch in range(5):
        assert visits_per_epoch(SOURCES, {"a": 2, "b": 0}, epoch, seed=0) == [0, 0, 1, 1, 8]
    assert visits_per_epoch(SOURCES, {}, 3, seed=0) == list(SOURCES)


def test_half_a_visit_is_one_in_every_other_epoch() -> None:
    # Two epochs make one visit of each row, and 4 rows at 1/2 make 2 visits in each epoch.
    sources = dict.fromkeys(range(4), "a")
    first, second = (visits_per_epoch(sources, {"a": 0.5}, epoch, seed=3) for epoch in (0, 1))
    assert (len(first), len(second)) == (2, 2)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert visits_per_epoch(sources, {"a": 0.5}, 2, seed=3) == first


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 30),
    weight=st.floats(0, 4, allow_nan=False),
    seed=st.integers(0, 10),
    num_epochs=st.integers(1, 12),
)
def test_neither_rows_nor_sources_drift_from_their_weight(
    num_rows: int, weight: float, seed: int, num_epochs: int
) -> None:
    sources = {10 * row: "a" for row in range(num_rows)} | {1: "other"}
    counts: Counter[int] = Counter()
    for epoch in range(num_epochs):
        visits = visits_per_epoch(sources, {"a": weight, "other": 0}, epoch, seed)
        assert math.floor(num_rows * weight - 1e-6) <= len(visits) <= math.ceil(num_rows * weight + 1e-6)
        counts.update(visits)
        wanted = weight * (epoch + 1)
        assert all(
            math.floor(wanted - 1e-9) <= counts[10 * row] <= math.ceil(wanted + 1e-9)
            for row in range(num_rows)
        )
        total = num_rows * wanted
        assert math.floor(total - 1e-6) <= sum(counts.values()) <= math.ceil(total + 1e-6)


def test_every_row_is_equally_likely_to_be_the_one_that_is_visited() -> None:
    # 5 rows at 0.3 in one epoch: each is visited with probability 0.3; over 4000 seeds the standard deviation of a
    # row's share is sqrt(0.3 * 0.7 / 4000) = 0.0072, and 4 of those are 0.029.
    sources = dict.fromkeys(range(5), "a")
    counts = Counter(row for seed in range(4000) for row in visits_per_epoch(sources, {"a": 0.3}, 0, seed))
    assert all(abs(counts[row] / 4000 - 0.3) < 0.029 for row in sources)


def test_the_visits_of_a_source_do_not_depend_on_the_others() -> None:
    sources = dict.fromkeys(range(9), "a")
    alone = visits_per_epoch(sources, {"a": 0.4}, 2, seed=1)
    both = visits_per_epoch(sources | dict.fromkeys(range(9, 20), "b"), {"a": 0.4, "b": 1.5}, 2, seed=1)
    assert [row for row in both if row < 9] == alone
    assert alone != visits_per_epoch(sources, {"a": 0.4}, 2, seed=2)


def test_weights_that_cannot_be_meant_are_refused() -> None:
    check_source_weights(SOURCES, {"a": 0, "b": 3})
    with pytest.raises(ValueError, match="names 'bb', but no row has that data source; did you mean 'b'"):
        check_source_weights(SOURCES, {"bb": 1})
    with pytest.raises(ValueError, match="names 'zzz', .*the rows have 'a', 'b', 'c'"):
        check_source_weights(SOURCES, {"zzz": 1})
    with pytest.raises(ValueError, match="is 0 for every data source"):
        check_source_weights(SOURCES, {"a": 0, "b": 0, "c": 0})
    for weight in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="data.source_weights is .* a finite number of at least 0"):
            DataConfig(source_weights={"a": weight})


def test_rounds_visit_no_row_twice_and_add_up_to_the_weights() -> None:
    sources = {row: "ab"[row % 2] for row in range(10)}
    rows, num_rounds = weighted_epochs(sources, {"a": 2.0, "b": 0.5}, 4, seed=3)
    assert num_rounds == 8, "four epochs at twice the visits of the largest weight"
    visited = [row for number in range(num_rounds) for row in rows(number)]
    assert all(len(set(rows(number))) == len(rows(number)) for number in range(num_rounds))
    counts = [visited.count(row) for row in range(10)]
    assert counts[0::2] == [8] * 5, "4 epochs x 2"
    assert counts[1::2] == [2] * 5, "4 epochs x 0.5"
    assert weighted_epochs(sources, {"a": 0.5}, None, seed=3)[1] is None


def test_a_sampler_visits_what_its_rounds_choose() -> None:
    sources = {row: "ab"[row % 2] for row in range(10)}
    rows, num_rounds = weighted_epochs(sources, {"a": 2.0, "b": 1.0}, 3, seed=3)
    sampler = PromptSampler(range(10), 4, 0, num_epochs=num_rounds, chosen=rows)
    assert sampler.num_steps == -(-(5 * 6 + 5 * 3) // 4)
    visits = [visit for _ in range(sampler.num_steps) for visit in sampler.next()]
    assert sampler.is_finished
    assert len(set(visits)) == len(visits) == 45
    for number in range(num_rounds or 0):
        assert sorted(row for epoch, row in visits if epoch == number) == sorted(rows(number))
    again = PromptSampler(range(10), 4, 0, num_epochs=num_rounds, chosen=rows)
    again.restore([visit_uid(*visit) for visit in visits[:21]])
    assert [visit for _ in range(sampler.num_steps) for visit in again.next()] == visits[21:]


def test_shares_of_sources_are_those_of_the_visits() -> None:
    # 2 rows of a, 3 of b, 1 of c: a quarter, a sixth and nothing per row; the rows of b are visited once.
    weights = weights_of_sources(SOURCES, {}, {"a": 0.5, "b": 0.5, "c": 0})
    assert weights == pytest.approx({"a": 1.5, "b": 1.0, "c": 0.0})
    visits = Counter(
        SOURCES[row] for epoch in range(2) for row in visits_per_epoch(SOURCES, weights, epoch, seed=1)
    )
    assert visits == {"a": 6, "b": 6}
    assert weights_of_sources(SOURCES, {}, {"a": 5, "b": 5, "c": 0}) == pytest.approx(dict(weights))
    with pytest.raises(ValueError, match=r"data.source_shares names no share of 'c': give every source one"):
        weights_of_sources(SOURCES, {}, {"a": 1, "b": 1})
    with pytest.raises(ValueError, match=r"x.source_shares names 'bb', but no row has"):
        weights_of_sources(SOURCES, {}, {"a": 1, "bb": 1}, section="x")
    with pytest.raises(ValueError, match=r"data.source_weights and data.source_shares both say"):
        DataConfig(source_weights={"a": 1}, source_shares={"a": 1})


def test_a_file_is_a_source_where_no_row_has_one_of_the_names() -> None:
    sizes = {"d/m.jsonl": 2, "d/n.parquet": 1}
    rows = {0: "x", 2: "x"}  # row 1 was too long
    found = by_entry(rows, ["m", "n"], list(sizes), sizes.__getitem__)
    assert found == {0: "m", 2: "n"}
    assert by_entry(rows, ["x"], list(sizes), sizes.__getitem__) == rows
    assert by_entry(rows, ["m", "y"], list(sizes), sizes.__getitem__) == rows


def test_files_of_one_name_are_called_by_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entries = ["d/a/train.jsonl", "d/b/train.jsonl", "d/a/more.jsonl", "hub:me/train"]
    names = ["a/train.jsonl", "b/train.jsonl", "more", "hub:me/train"]
    assert list(entry_names(entries).values()) == names
    absolute = [f"{tmp_path}/{entry}" if entry.startswith("d/") else entry for entry in entries]
    assert list(entry_names(absolute).values()) == names
    monkeypatch.chdir("/")
    assert list(entry_names(["../d/a/train.jsonl", "../d/b/train.jsonl"]).values()) == names[:2]


def test_a_whole_entry_names_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was typed; a run folder holds absolute paths."""
    monkeypatch.chdir(tmp_path)
    entries = ("a/train.jsonl", "b/train.jsonl", "c/other.jsonl")
    weights = {"a/train.jsonl": 2.0, "b/train.jsonl": 1.0, "c/other.jsonl": 0.5}
    expected = {"a/train.jsonl": 2.0, "b/train.jsonl": 1.0, "other": 0.5}
    for entry in entries:
        (tmp_path / entry).parent.mkdir()
        (tmp_path / entry).touch()
    for made in (
        DataConfig(train_files=entries, source_weights=weights),
        SftDataConfig(train_files=entries, source_weights=weights),
    ):
        assert made.source_weights == expected
        kept = with_absolute_paths(made)
        assert kept.source_weights == expected
        assert list(entry_names(kept.train_files).values()) == list(expected)
    beside = tuple(f"../{tmp_path.name}/{entry}" for entry in entries[:2])
    assert SftDataConfig(
        train_files=beside, source_shares={beside[0]: 0.3, beside[1]: 0.7}
    ).source_shares == {
        "a/train.jsonl": 0.3,
        "b/train.jsonl": 0.7,
    }
    with pytest.raises(ValueError, match="data.source_weights names a source twice"):
        DataConfig(train_files=entries, source_weights={"other": 1.0, "c/other.jsonl": 2.0})
