"""Declared metrics: members of families, and what is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator

import pytest

from strop.utils.metrics import METRICS, Metric


@pytest.fixture
def score() -> Iterator[Metric]:
    yield Metric("made/<source>/{mean,max}", "points", "over samples")
    del METRICS["made/<source>/{mean,max}"]


def test_a_metric_is_its_name(score: Metric) -> None:
    assert METRICS["made/<source>/{mean,max}"] is score
    assert (score.unit, score.over, score.last) == ("points", "over samples", "{mean,max}")
    assert json.dumps({score: 1.0}) == '{"made/<source>/{mean,max}": 1.0}'
    again = pickle.loads(pickle.dumps(score))
    assert (again, type(again)) == (score, str)


def test_a_member_of_a_family_fills_its_places_in_order(score: Metric) -> None:
    assert score.of("strop/exact", "max") == "made/strop/exact/max"
    assert score.of("a\\1{mean}", "mean") == r"made/a\1{mean}/mean", "text of users is taken as it is"


@pytest.mark.parametrize("words", [(), ("a",), ("a", "min"), ("a", "mean", "mean")])
def test_what_is_no_member_is_refused(score: Metric, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"metric 'made/<source>/\{mean,max\}' has no member"):
        score.of(*words)


def test_a_name_means_one_thing(score: Metric) -> None:
    assert Metric(str(score), "points", "over samples") == score
    with pytest.raises(ValueError, match="declared twice: 'over samples', and 'over tokens'"):
        Metric(str(score), "points", "over tokens")
