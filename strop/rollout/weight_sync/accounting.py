"""Accounting of one sync: what has arrived, what is missing, and what is wrong, without any transport.

The first problem is kept and the rest of the sync is let pass, so that all processes stay in step until the sender's
commit; then the problem is raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from strop.engines.weights import TensorMetadata, WeightsMetadata
from strop.rollout.weight_sync.delta import ChangedPart, Changes, joined_changes
from strop.rollout.weight_sync.stream import tensor_at
from strop.rollout.weight_sync.types import REFUSAL, SyncCorrupted, SyncError, SyncIncomplete, SyncRefused

_NAMES_SHOWN = 3


class TransferState:
    """The receiver's account of one sync."""

    def __init__(
        self, version: int, sent: WeightsMetadata, needed: WeightsMetadata, *, holds_base: bool = False
    ) -> None:
        """Compare what will be sent with what the engine holds.

        Args:
            version: policy version.
            sent: the sender's weights.
            needed: the weights that the engine needs.
            holds_base: the engine holds the weights of the sender's last sync, so that changes of them are enough.

        Raises:
            SyncIncomplete: the engine needs tensors that the sender does not have.
            SyncRefused: an unknown name, another shape or dtype, or tensors tied here and not there.
        """
        self._version = version
        self._sent = sent
        self._needed = needed
        self._holds_base = holds_base
        self._arrived: dict[str, int] = {}
        self._begun: tuple[str, int] | None = None
        self._problem: SyncError | None = None
        missing = [weight.name for weight in needed if not any(name in sent.by_name for name in weight.names)]
        if missing:
            raise self._incomplete(missing, len(needed), "in the trainer's model")
        self._destinations = {weight.name: self._destination(weight) for weight in sent}
        self._check_ties()

    def take(
        self, number: int, entries: Sequence[tuple[TensorMetadata, int]], data: Tensor
    ) -> list[tuple[str, Tensor]]:
        """Enter one bucket; the engine's names with their new values, views of `data` [n] uint8.

        Empty once something went wrong.
        """
        if self._problem is not None:
            return []
        loads = []
        for weight, offset in entries:
            self._problem = self._problem_of(number, weight, offset, len(data))
            if self._problem is not None:
                return []
            self._arrived[weight.name] = number
            value = tensor_at(data, weight, offset)
            loads += [(name, value) for name in self._destinations[weight.name]]
        return loads

    def take_part(
        self, number: int, weight: TensorMetadata, start: int, data: Tensor
    ) -> list[tuple[str, int, Tensor]]:
        """Enter a bucket that holds a part of one weight, which arrive in their order: the engine's names, the first
        byte, and the bytes [n] uint8. Empty once something went wrong."""
        if self._problem is not None:
            return []
        expected = self._begun[1] if self._begun is not None and self._begun[0] == weight.name else 0
        stop = start + len(data)
        self._problem = self._problem_of(number, weight, 0, max(len(data), weight.num_bytes))
        if self._problem is None and (start != expected or not start < stop <= weight.num_bytes):
            self._problem = SyncCorrupted(
                f"sync {self._version} corrupted: bucket {number} holds bytes {start} to {stop} of {weight.name}, "
                f"which has {weight.num_bytes}, and {expected} have arrived; {REFUSAL}"
            )
        if self._problem is not None:
            return []
        self._begun = (weight.name, stop) if stop < weight.num_bytes else None
        if self._begun is None:
            self._arrived[weight.name] = number
        return [(name, start, data) for name in self._destinations[weight.name]]

    def take_changes(
        self, number: int, weight: TensorMetadata, parts: Sequence[ChangedPart], data: Tensor
    ) -> list[tuple[str, Changes]]:
        """Enter the changes of parts of one weight, which lie in a bucket [n] uint8: the engine's names with the
        changes, whose values may be a view of `data`. Empty once something went wrong."""
        if self._problem is not None:
            return []
        self._problem = self._problem_of(number, weight, 0, weight.num_bytes)
        if self._problem is None and not self._holds_base:
            self._problem = SyncCorrupted(
                f"sync {self._version} corrupted: bucket {number} holds changes of {weight.name}, whose value before "
                f"them is not here; {REFUSAL}"
            )
        if self._problem is not None:
            return []
        try:
            changes = joined_changes(data, weight, parts)
        except ValueError as error:
            self._problem = SyncCorrupted(
                f"sync {self._version} corrupted: the changes of {weight.name} in bucket {number} cannot be read "
                f"({error}); {REFUSAL}"
            )
            return []
        self._arrived[weight.name] = number
        return [(name, changes) for name in self._destinations[weight.name]]

    def keep(self, names: Sequence[str]) -> list[str]:
        """Enter weights that are said to be those of the last sync, which their digests have to show.

        Returns:
            The engine's names of them; none where it does not hold the last sync, because it gets all weights.
        """
        if not self._holds_base:
            return []
        for name in names:
            if self._problem is None and (name in self._arrived or name not in self._sent.by_name):
                self._problem = SyncCorrupted(
                    f"sync {self._version} corrupted: {name} was left out, which arrived or was not announced; "
                    f"{REFUSAL}"
                )
            self._arrived[name] = -1
        if self._problem is not None:
            return []
        return [destination for name in names for destination in self._destinations[name]]

    def check_complete(self) -> None:
        """Every tensor arrived once.

        Raises:
            SyncError: the first problem, or what is missing.
        """
        if self._problem is not None:
            raise self._problem
        missing = self.missing()
        if missing:
            raise self._incomplete(missing, len(self._sent))

    def names_to_read(self) -> list[str]:
        """The engine's names, aliases included, whose live values the digests are compared with."""
        return [name for weight in self._sent for name in weight.names if name in self._needed.by_name]

    def check_digests(self, live: Mapping[str, int], expected: Mapping[str, int]) -> None:
        """The live parameters are what was sent.

        Args:
            live: digest by each of `names_to_read`, read from the engine after loading.
            expected: digest by the name of each sent weight, from the sender.

        Raises:
            SyncCorrupted: naming the tensors that differ.
        """
        wrong = []
        for weight in self._sent:
            names = [name for name in weight.names if name in self._needed.by_name]
            differing = [name for name in names if live[name] != expected.get(weight.name)]
            if differing and len(differing) < len(names):
                same = next(name for name in names if name not in differing)
                wrong.append(f"{differing[0]} (tied to {same}, of which the engine keeps another copy)")
            elif differing:
                wrong.append(differing[0])
        if wrong:
            verb, whose = ("differs", "its digest") if len(wrong) == 1 else ("differ", "their digests")
            raise SyncCorrupted(
                f"sync {self._version} corrupted: {_some(wrong)} {verb} from {whose}; {REFUSAL}"
            )

    def missing(self) -> list[str]:
        """Names of the tensors that have not arrived."""
        return [weight.name for weight in self._sent if weight.name not in self._arrived]

    def interrupted(self, cause: str) -> SyncIncomplete:
        """The error of a sync that ended before its commit."""
        return self._incomplete(self.missing(), len(self._sent), f"when it ended ({cause})")

    def _incomplete(self, missing: Sequence[str], total: int, where: str = "") -> SyncIncomplete:
        named = f" ({_some(missing)})" if missing else ""
        return SyncIncomplete(
            f"sync {self._version} incomplete: {len(missing)} of {total} tensors missing{named}"
            f"{' ' if where else ''}{where}; {REFUSAL}"
        )

    def _destination(self, weight: TensorMetadata) -> tuple[str, ...]:
        """The engine's weights, by their first names, that take this weight's value."""
        candidates = [self._needed.by_name[name] for name in weight.names if name in self._needed.by_name]
        if not candidates:
            raise SyncRefused(
                f"sync {self._version} refused: the rollout worker's model has no {weight.name}; both sides must load "
                f"the same model; {REFUSAL}"
            )
        for stored in candidates:
            for label, here, there in (
                ("shape", list(stored.shape), list(weight.shape)),
                ("dtype", stored.dtype, weight.dtype),
            ):
                if here != there:
                    raise SyncRefused(
                        f"sync {self._version} refused: {weight.name} has {label} {there} in the trainer and {here} in "
                        f"the rollout worker; both sides must load the same model, and the sender casts to a dtype on "
                        f"request; {REFUSAL}"
                    )
        return tuple(dict.fromkeys(stored.name for stored in candidates))

    def _check_ties(self) -> None:
        source: dict[str, str] = {}
        for name, destinations in self._destinations.items():
            for destination in destinations:
                if destination in source:
                    raise SyncRefused(
                        f"sync {self._version} refused: {source[destination]} and {name} are two tensors in the "
                        f"trainer and one (tied) in the rollout worker; both sides must load the same model; {REFUSAL}"
                    )
                source[destination] = name

    def _problem_of(self, number: int, weight: TensorMetadata, offset: int, size: int) -> SyncError | None:
        promised = self._sent.by_name.get(weight.name)
        problem = None
        if promised is None:
            problem = f"bucket {number} holds {weight.name}, which the sync did not announce"
        elif weight.name in self._arrived:
            problem = f"{weight.name} arrived twice, in buckets {self._arrived[weight.name]} and {number}"
        elif weight != promised:
            problem = (
                f"{weight.name} arrived as {list(weight.shape)} {weight.dtype}, but {list(promised.shape)} "
                f"{promised.dtype} was announced"
            )
        elif offset < 0 or offset + weight.num_bytes > size:
            problem = f"{weight.name} does not lie within bucket {number} of {size} bytes"
        return (
            None
            if problem is None
            else SyncCorrupted(f"sync {self._version} corrupted: {problem}; {REFUSAL}")
        )


def _some(names: Sequence[str]) -> str:
    """The first names, and a sign that there are more."""
    return ", ".join([*names[:_NAMES_SHOWN], *(["…"] if len(names) > _NAMES_SHOWN else [])])
