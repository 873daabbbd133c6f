"""The ranks that generate together, each with its part of the model: of every matrix, of the layers or of the experts.

Each rank plays requests of its own; all of them compute every request of the group, each with its heads, its hidden
units, its tokens of the vocabulary, its layers and its experts. What a batch does next follows from its requests and
from the memory that is free, so ranks that know the same of both do the same. They tell each other before each step:
which requests are new, which are to end, how much memory each has left, and a checksum of the tokens that it sampled:
where each has logits of its own, ranks that do not compute to the same bit would go apart without a word.

Concurrency: `exchange` is a collective of the group; every rank calls it before each step, until all of them have
left. It waits for the others, so not on an event loop. `least` is one inside of a step, which all of them are in. Every
wait ends with the group's timeout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from strop.rollout.types import Sampling

_DONE, _HELD, _FORGETS = 1, 2, 4


class RankFailed(RuntimeError):
    """Another rank of the group has given up, so that the requests of all of them end."""


class RanksDiffer(RuntimeError):
    """The ranks of the group sampled different tokens."""


@dataclass(frozen=True)
class Asked:
    """A request that a rank takes part in for the first time."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Note:
    """Facts that a rank tells the others before a step."""

    asked: Sequence[Asked] = ()
    """Its own requests, in order."""
    dropped: Sequence[str] = ()
    """Ids of its own requests that are to end."""
    is_done: bool = False
    """It wants to leave as soon as all do."""
    is_held: bool = False
    """It wants to hold its requests."""
    forgets: bool = False
    """Computed prompts are to be forgotten."""
    free_bytes: int = 0
    """Memory, per layer that it has, that its cache may still take a share of."""
    sampled: int = 0
    """Checksum of all tokens that it has sampled."""
    failure: str = ""
    """It has given up for this reason."""

    @property
    def _flags(self) -> int:
        return _DONE * self.is_done + _HELD * self.is_held + _FORGETS * self.forgets

    def header(self, content: bytes) -> list[int]:
        """The numbers that every rank tells."""
        return [len(content), self.free_bytes, self._flags, self.sampled]

    def content(self) -> bytes:
        """All else, as JSON; nothing where there is nothing."""
        if not (self.asked or self.dropped or self.failure):
            return b""
        asked = [[one.request_id, one.prompt_ids, asdict(one.sampling)] for one in self.asked]
        return json.dumps([asked, list(self.dropped), self.failure]).encode()


class RankGroup:
    """The ranks of one group, as one of them sees them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def exchange(self, note: Note) -> list[Note]:
        """The notes of all ranks, in their order.

        Raises:
            RuntimeError: a rank is gone, or did not come within the group's timeout.
        """
        content = note.content()
        headers = self._gathered(torch.tensor(note.header(content)))
        longest = max(header[0] for header in headers)
        if not longest:
            return [_note(header, b"") for header in headers]
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else padded[:0]
        )
        contents = self._gathered(padded)
        return [
            _note(header, bytes(said[: header[0]])) for header, said in zip(headers, contents, strict=True)
        ]

    def least(self, number: int) -> int:
        """The smallest of the numbers that all ranks call this with; a collective."""
        return min(first for (first,) in self._gathered(torch.tensor([number])))

    def _gathered(self, tensor: torch.Tensor) -> list[list[int]]:
        every = tensor.new_empty((self.size, *tensor.shape))
        dist.all_gather(list(every.unbind()), tensor, group=self._group)
        numbers: list[list[int]] = every.tolist()
        return numbers


def _note(header: Sequence[int], content: bytes) -> Note:
    _, free_bytes, flags, sampled = header
    asked, dropped, failure = json.loads(content) if content else ([], [], "")
    return Note(
        asked=[Asked(name, tuple(ids), _sampling(options)) for name, ids, options in asked],
        dropped=dropped,
        is_done=bool(flags & _DONE),
        is_held=bool(flags & _HELD),
        forgets=bool(flags & _FORGETS),
        free_bytes=free_bytes,
        sampled=sampled,
        failure=failure,
    )


def _sampling(options: dict[str, object]) -> Sampling:
    stops = options["stop_token_ids"]
    assert isinstance(stops, list), "as `content` wrote it"
    return Sampling(**{**options, "stop_token_ids": tuple(stops)})  # type: ignore[arg-type]
