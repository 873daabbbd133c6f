"""The ledger against a plain dictionary, over any sequence of issues, fates, resumes and checkpoints."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.run import EventLog, Fate, Ledger, LedgerError
from strop.run.ledger import FINAL_FATES, _from_ranges, _to_ranges


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(EventLog(tmp_path / "events.jsonl"))


def test_issued_is_the_sum_of_fates_and_in_flight(ledger: Ledger) -> None:
    ledger.issue(1, [f"e0-000007/{i}" for i in range(4)] + ["e0-000002/0"])
    ledger.settle(1, {"e0-000007/0": Fate("trained"), "e0-000007/2": Fate("filtered", "all rewards equal")})
    ledger.settle(2, {"e0-000002/0": Fate("failed", "reward timed out")})
    assert ledger.counts() == {
        "issued": 5,
        "in_flight": 2,
        "trained": 1,
        "filtered": 1,
        "failed": 1,
        "stale": 0,
    }
    assert ledger.in_flight() == ("e0-000007/1", "e0-000007/3")
    assert ledger.consumed() == ("e0-000007", "e0-000002"), "in the order of issue"
    ledger.check()


def test_a_second_fate_is_refused_by_name_and_changes_nothing(ledger: Ledger) -> None:
    ledger.issue(1, ["p/0", "p/1"])
    ledger.settle(1, {"p/0": Fate("trained")})
    with pytest.raises(LedgerError, match="already has a fate: p/0; a sample is trained or dropped once"):
        ledger.settle(2, {"p/1": Fate("trained"), "p/0": Fate("trained")})
    assert ledger.in_flight() == ("p/1",)
    ledger.check()


def test_unknown_and_repeated_ids_are_named(ledger: Ledger) -> None:
    ledger.issue(1, [f"p/{i}" for i in range(9)])
    with pytest.raises(LedgerError, match="never issued: q/0;"):
        ledger.settle(1, {"q/0": Fate("trained")})
    with pytest.raises(LedgerError, match="already issued: p/0, p/1, p/2, p/3, p/4 and 4 more"):
        ledger.issue(2, [f"p/{i}" for i in range(9)])
    with pytest.raises(LedgerError, match="the id q/0 is given twice"):
        ledger.issue(2, ["q/0", "q/0"])
    with pytest.raises(ValueError, match="'loose' is not '<prompt uid>/<sample index>'"):
        ledger.issue(2, ["loose"])
    with pytest.raises(ValueError, match="leave it out until it ends"):
        ledger.settle(2, {"p/0": Fate("in_flight")})
    with pytest.raises(ValueError, match="unknown fate 'lost'"):
        Fate("lost")  # type: ignore[arg-type]


def test_check_recounts_from_the_file(ledger: Ledger, tmp_path: Path) -> None:
    ledger.issue(1, ["p/0"])
    EventLog(tmp_path / "events.jsonl").append("settled", 1, fates={"trained": {"": {"p": "0"}}})
    with pytest.raises(LedgerError, match=r"'trained': 1.*another process may have written"):
        ledger.check()


def test_check_finds_a_sample_trained_twice_in_the_file(ledger: Ledger, tmp_path: Path) -> None:
    ledger.issue(1, ["p/0"])
    ledger.settle(1, {"p/0": Fate("trained")})
    EventLog(tmp_path / "events.jsonl").append("settled", 2, fates={"trained": {"": {"p": "0"}}})
    with pytest.raises(LedgerError, match="already has a fate: p/0"):
        ledger.check()


def test_rollback_puts_settled_samples_back_in_flight(ledger: Ledger, tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    ledger = Ledger(events)
    ledger.issue(1, ["a/0", "b/0"])
    ledger.settle(1, {"a/0": Fate("trained")})
    ledger.settle(2, {"b/0": Fate("trained")})
    ledger.issue(2, ["c/0"])
    events.rollback(1)
    ledger.reload()
    assert ledger.in_flight() == ("b/0",)
    assert ledger.consumed() == ("a", "b")


def test_restore_takes_the_checkpoint_where_the_log_lost_records(ledger: Ledger, tmp_path: Path) -> None:
    ledger.issue(1, ["a/0", "a/1", "b/0"])
    ledger.settle(1, {"a/1": Fate("stale")})
    state = json.loads(json.dumps(ledger.state()))
    other = Ledger(EventLog(tmp_path / "other.jsonl"))
    other.restore(1, state)
    assert other.counts() == ledger.counts()
    assert Ledger(EventLog(tmp_path / "other.jsonl")).in_flight() == ("a/0", "b/0")
    size = ledger._events.path.stat().st_size
    ledger.restore(1, state)
    assert ledger._events.path.stat().st_size == size, "a log that agrees gets no record"
    state["counts"]["trained"] = 7
    with pytest.raises(LedgerError, match="contradicts itself"):
        other.restore(1, state)


@given(st.dictionaries(st.sampled_from("abc"), st.sets(st.integers(0, 70), min_size=1).map(sorted)))
@settings(max_examples=50, deadline=None)
def test_ranges_round_trip(indices: dict[str, list[int]]) -> None:
    masks = {uid: sum(1 << i for i in ones) for uid, ones in indices.items()}
    assert _from_ranges(_to_ranges(masks)) == masks


def test_ranges_are_short_and_readable() -> None:
    assert _to_ranges({"u": 0b100111, "v": 0xFF, "w": 0b1010}) == {"u": "0-2,5", "v": "0-7", "w": "1,3"}


IDS = st.builds("{}/{}".format, st.sampled_from(["e0-000001", "e0-000002", "e1-000001"]), st.integers(0, 3))
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("issue"), st.sets(IDS, max_size=5).map(sorted)),
        st.tuples(st.just("settle"), st.dictionaries(IDS, st.sampled_from(FINAL_FATES), max_size=4)),
        st.tuples(st.just("rollback"), st.integers(1, 3)),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=25,
)


@given(ACTIONS)
@settings(max_examples=60, deadline=None)
def test_ledger_equals_a_dictionary_of_fates(actions: list[tuple[str, object]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        events = EventLog(Path(folder) / "events.jsonl")
        ledger = Ledger(events)
        model: dict[str, str] = {}
        history: list[dict[str, str]] = [{}]  # the model after each step; every action is one step
        for kind, argument in actions:
            step = len(history)
            if kind == "issue":
                if model.keys() & set(argument):
                    with pytest.raises(LedgerError, match="already issued"):
                        ledger.issue(step, argument)
                else:
                    ledger.issue(step, argument)
                    model |= dict.fromkeys(argument, "in_flight")
            elif kind == "settle":
                fates = {sample_id: Fate(name, name[:2]) for sample_id, name in argument.items()}
                if all(model.get(sample_id) == "in_flight" for sample_id in argument):
                    ledger.settle(step, fates)
                    model |= argument
                else:
                    with pytest.raises(LedgerError, match="never issued|already has a fate"):
                        ledger.settle(step, fates)
            elif kind == "rollback":
                back = max(step - 1 - argument, 0)
                events.rollback(back)
                ledger.reload()
                model, history = dict(history[back]), history[: back + 1]
                continue
            else:
                events.close()
                events = EventLog(Path(folder) / "events.jsonl")
                ledger = Ledger(events)
            history.append(dict(model))
        ledger.check()
        names = list(model.values())
        expected = {name: names.count(name) for name in ("in_flight", *FINAL_FATES)}
        assert ledger.counts() == {"issued": len(names), **expected}
        assert sorted(ledger.in_flight()) == sorted(one for one, fate in model.items() if fate == "in_flight")
        assert set(ledger.consumed()) == {sample_id.split("/")[0] for sample_id in model}
        other = Ledger(EventLog(Path(folder) / "other.jsonl"))
        other.restore(0, json.loads(json.dumps(ledger.state())))
        assert (other.state(), other.in_flight()) == (ledger.state(), ledger.in_flight())
        events.close()
        other._events.close()
