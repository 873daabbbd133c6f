"""The sample ledger: every issued sample has one fate, and nothing is trained twice.

A view over the event log. Sample ids are "<prompt uid>/<sample index>"; log and checkpoints hold them as
ranges of indices per prompt ("0-7"), memory as one bit per sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from strop.run.errors import RunError
from strop.run.events import Event, EventLog
from strop.run.records import is_ledger

FateName = Literal["trained", "filtered", "failed", "stale", "in_flight"]
FINAL_FATES: tuple[str, ...] = tuple(name for name in get_args(FateName) if name != "in_flight")

ISSUED, SETTLED, RESTORED = "issued", "settled", "ledger_restored"
"""Kinds of the ledger's event records."""

_MAX_NAMED_IDS = 5  # in an error: enough to look one up, short enough to read


class LedgerError(RunError):
    """A sample would get two fates, or one without having been issued; the message names the ids."""


@dataclass(frozen=True)
class Fate:
    """Final status of a sample."""

    name: FateName
    reason: str = ""
    """Rule that filtered it, or cause of its failure; empty when the name says all."""

    def __post_init__(self) -> None:
        if self.name not in get_args(FateName):
            raise ValueError(f"unknown fate {self.name!r}; known: {', '.join(get_args(FateName))}")


class Ledger:
    """Ledger of the issued samples and their fates; the position of a run in its data."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._tally = _replay(events)

    def issue(self, step: int, ids: Iterable[str]) -> None:
        """Record that these samples are being made; their prompts count as consumed from here on.

        Raises:
            LedgerError: an id was issued before, or is given twice.
        """
        samples = _by_prompt(ids)
        if not samples:
            return
        self._tally.check_issue(samples)
        self._events.append(ISSUED, step, samples=_to_ranges(samples))
        self._tally.issue(samples)

    def settle(self, step: int, fates: Mapping[str, Fate]) -> None:
        """Record the final fate of samples. Samples left out stay in flight.

        Raises:
            LedgerError: an id was never issued, or has a fate already.
            ValueError: the fate is "in_flight", which is not a final one.
        """
        groups: dict[tuple[str, str], list[str]] = {}
        for sample_id, fate in fates.items():
            if fate.name == "in_flight":
                raise ValueError(f"sample {sample_id} cannot settle as in_flight: leave it out until it ends")
            groups.setdefault((fate.name, fate.reason), []).append(sample_id)
        if not groups:
            return
        self._tally.check_settle(_by_prompt(fates))
        record: dict[str, dict[str, dict[str, str]]] = {}
        for (name, reason), ids in groups.items():
            record.setdefault(name, {})[reason] = _to_ranges(_by_prompt(ids))
        self._events.append(SETTLED, step, fates=record)
        for (name, _), ids in groups.items():
            self._tally.settle(name, _by_prompt(ids))

    def in_flight(self) -> tuple[str, ...]:
        """Ids that were issued and have no fate yet, in the order of issue: a resume makes these again."""
        return tuple(self._tally.in_flight())

    def consumed(self) -> tuple[str, ...]:
        """Uids of all prompts with an issued sample, in the order of issue: the sampler passes over these."""
        return tuple(self._tally.issued)

    def counts(self) -> dict[str, int]:
        """Samples issued, in flight, and per final fate; issued is the sum of the others."""
        return self._tally.counts()

    def check(self) -> None:
        """Count again from the file: one fate per sample, none twice, and the same totals as in memory.

        Raises:
            LedgerError: the log contradicts itself, or this object.
        """
        recount = _replay(self._events)
        if recount != self._tally:
            raise LedgerError(
                f"the event log {self._events.path} says {recount.counts()}, but this process counted "
                f"{self._tally.counts()}; another process may have written the log"
            )

    def state(self) -> dict[str, Any]:
        """All of the ledger as JSON values, for the manifest of a checkpoint; `restore` takes it back."""
        return {
            "counts": self.counts(),
            "issued": _to_ranges(self._tally.issued),
            "settled": _to_ranges(self._tally.settled),
        }

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint, after the event log was rolled back to its step.

        The log normally says the same. Where it does not (records lost in a power cut, a checkpoint that
        was brought from another run) the checkpoint is right, and the log gets a record that says so.

        Raises:
            LedgerError: the state contradicts itself.
        """
        restored = _from_state(state)
        if restored == self._tally:
            return
        self._events.append(RESTORED, step, fsync=True, state=dict(state))
        self._tally = restored

    def reload(self) -> None:
        """Count again after the event log was rolled back."""
        self._tally = _replay(self._events)


@dataclass
class _Tally:
    """The ledger in memory: per prompt, bit i is set for sample i."""

    issued: dict[str, int] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    fates: Counter[str] = field(default_factory=Counter)

    def check_issue(self, samples: Mapping[str, int]) -> None:
        again = {uid: mask & self.issued.get(uid, 0) for uid, mask in samples.items()}
        if any(again.values()):
            raise LedgerError(f"already issued: {_listed(again)}; a sample id is issued once per run")

    def issue(self, samples: Mapping[str, int]) -> None:
        self.check_issue(samples)
        for uid, mask in samples.items():
            self.issued[uid] = self.issued.get(uid, 0) | mask

    def check_settle(self, samples: Mapping[str, int]) -> None:
        unknown = {uid: mask & ~self.issued.get(uid, 0) for uid, mask in samples.items()}
        if any(unknown.values()):
            raise LedgerError(
                f"never issued: {_listed(unknown)}; issue samples before their fate is recorded"
            )
        again = {uid: mask & self.settled.get(uid, 0) for uid, mask in samples.items()}
        if any(again.values()):
            raise LedgerError(f"already has a fate: {_listed(again)}; a sample is trained or dropped once")

    def settle(self, name: str, samples: Mapping[str, int]) -> None:
        self.check_settle(samples)
        for uid, mask in samples.items():
            self.settled[uid] = self.settled.get(uid, 0) | mask
            self.fates[name] += mask.bit_count()

    def in_flight(self) -> Iterator[str]:
        for uid, mask in self.issued.items():
            open_samples = mask & ~self.settled.get(uid, 0)
            if open_samples:
                yield from (f"{uid}/{index}" for index in _indices(open_samples))

    def counts(self) -> dict[str, int]:
        num_issued = sum(mask.bit_count() for mask in self.issued.values())
        num_settled = sum(mask.bit_count() for mask in self.settled.values())
        fates = {name: self.fates[name] for name in FINAL_FATES}
        return {"issued": num_issued, "in_flight": num_issued - num_settled, **fates}


def _replay(events: EventLog) -> _Tally:
    try:
        return _tally_of(events.read())
    except LedgerError as error:
        raise LedgerError(f"the event log {events.path} contradicts itself: {error}") from error


def _tally_of(events: Iterable[Event]) -> _Tally:
    tally = _Tally()
    for event in events:
        if event["kind"] == ISSUED:
            tally.issue(_from_ranges(event["samples"]))
        elif event["kind"] == SETTLED:
            for name, by_reason in event["fates"].items():
                for samples in by_reason.values():
                    tally.settle(name, _from_ranges(samples))
        elif event["kind"] == RESTORED:
            tally = _from_state(event["state"])
    return tally


def _from_state(state: Mapping[str, Any]) -> _Tally:
    if not is_ledger(state):
        raise LedgerError(
            "the ledger in the checkpoint is damaged: it lacks counts or samples, or has them in another form; resume "
            "from another checkpoint"
        )
    counts = state["counts"]
    fates = Counter({name: counts[name] for name in FINAL_FATES if counts[name]})
    tally = _Tally(_from_ranges(state["issued"]), _from_ranges(state["settled"]), fates)
    unknown = {uid: mask & ~tally.issued.get(uid, 0) for uid, mask in tally.settled.items()}
    if any(unknown.values()) or tally.counts() != counts or sum(fates.values()) != _num_settled(tally):
        raise LedgerError(
            f"the ledger in the checkpoint contradicts itself: it states {counts} and lists "
            f"{tally.counts()}; resume from another checkpoint"
        )
    return tally


def _num_settled(tally: _Tally) -> int:
    return sum(mask.bit_count() for mask in tally.settled.values())


def _by_prompt(ids: Iterable[str]) -> dict[str, int]:
    """Bit mask of sample indices per prompt uid, in the order of first appearance."""
    masks: dict[str, int] = {}
    for sample_id in ids:
        uid, _, index = sample_id.rpartition("/")
        if not uid or not index.isdecimal():
            raise ValueError(f"sample id {sample_id!r} is not '<prompt uid>/<sample index>'")
        bit = 1 << int(index)
        if masks.get(uid, 0) & bit:
            raise LedgerError(f"the id {sample_id} is given twice in one call")
        masks[uid] = masks.get(uid, 0) | bit
    return masks


def _indices(mask: int) -> list[int]:
    return [index for index, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]


def _to_ranges(masks: Mapping[str, int]) -> dict[str, str]:
    """Masks as text: bits 0, 1, 2 and 5 are "0-2,5"."""
    texts: dict[str, str] = {}
    for uid, mask in masks.items():
        runs: list[list[int]] = []
        for index in _indices(mask):
            if runs and index == runs[-1][1] + 1:
                runs[-1][1] = index
            else:
                runs.append([index, index])
        texts[uid] = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return texts


def _from_ranges(texts: Mapping[str, str]) -> dict[str, int]:
    masks: dict[str, int] = {}
    for uid, text in texts.items():
        mask = 0
        for run in filter(None, text.split(",")):
            low, _, high = run.partition("-")
            first, last = int(low), int(high or low)
            mask |= ((1 << max(last - first + 1, 0)) - 1) << first
        masks[uid] = mask
    return masks


def sample_ids(ranges: Mapping[str, str]) -> list[str]:
    """The ids behind the ranges of one record: {"e0-000012": "0-1"} are e0-000012/0 and e0-000012/1."""
    return [f"{uid}/{index}" for uid, mask in _from_ranges(ranges).items() for index in _indices(mask)]


def _listed(masks: Mapping[str, int]) -> str:
    ids = [f"{uid}/{index}" for uid, mask in masks.items() for index in _indices(mask)]
    more = f" and {len(ids) - _MAX_NAMED_IDS} more" if len(ids) > _MAX_NAMED_IDS else ""
    return ", ".join(ids[:_MAX_NAMED_IDS]) + more


__all__ = ["FINAL_FATES", "SETTLED", "Fate", "FateName", "Ledger", "LedgerError", "sample_ids"]
