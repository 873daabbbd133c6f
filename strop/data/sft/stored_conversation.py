"""One conversation as it is trained, and in little memory; what is kept of one that is too long."""

from __future__ import annotations

import dataclasses
from array import array
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from strop.protocol.trajectory import Media


@dataclass(frozen=True, eq=False)
class TeacherTop:
    """What a teacher found likely in the place of each token of an answer, as it was logged."""

    start: int
    """Number of the first token that it is about; it is about all from there on."""
    ids: NDArray[np.int32]
    """[tokens, K]: tokens that it finds likely."""
    log_probs: NDArray[np.float32]
    """[tokens, K]: their log-probs, at temperature 1."""

    def cut(self, first: int, last: int) -> TeacherTop:
        """Of the tokens from `first` up to `last` alone."""
        begin, end = max(first - self.start, 0), max(last - self.start, 0)
        return TeacherTop(max(self.start - first, 0), self.ids[begin:end], self.log_probs[begin:end])


@dataclass(frozen=True, kw_only=True)
class SftExample:
    """One conversation as it is trained."""

    row: int
    """Row number in the files, before any filter."""
    token_ids: tuple[int, ...]
    """The whole conversation."""
    loss_mask: tuple[bool, ...]
    """True on tokens of assistant turns, the end-of-turn token included."""
    media: tuple[Media, ...] = ()
    """Images, in the order of their tokens."""
    teacher: TeacherTop | None = None
    """What a teacher finds likely, of the tokens from its `start` on."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.loss_mask):
            raise ValueError(
                f"row {self.row} has {len(self.token_ids)} token_ids and {len(self.loss_mask)} loss_mask "
                f"entries; they must be as many"
            )
        if not any(self.loss_mask):
            raise ValueError(
                f"row {self.row} has no token with a loss; it needs an assistant message with text"
            )


@dataclass(frozen=True)
class Kept:
    """A conversation, in little memory."""

    row: int
    ids: array[int]
    mask: bytes
    media: tuple[Media, ...] = ()
    teacher: TeacherTop | None = None

    def example(self) -> SftExample:
        """As it is trained."""
        return SftExample(
            row=self.row,
            token_ids=tuple(self.ids),
            loss_mask=tuple(map(bool, self.mask)),
            media=self.media,
            teacher=self.teacher,
        )


def with_images(kept: Kept, images: Any) -> Kept:
    """As many tokens for each image as stand for it, none of them trained."""
    ids = images.expand(kept.ids)
    media = images.media(ids)
    mask, read = bytearray(), 0
    for one in media:
        before = one.start - len(mask)
        mask += kept.mask[read : read + before] + bytes(one.num_tokens)
        read += before + 1  # the token that the template wrote for it
    return Kept(kept.row, ids, bytes(mask + kept.mask[read:]), media)


def cut(kept: Kept, limit: int, side: Literal["left", "right"]) -> Kept | None:
    """At most so many tokens, without a part of an image; None where none of them is trained.

    The first token of all is not trained: nothing predicts it.
    """
    first, last = (0, limit) if side == "right" else (len(kept.ids) - limit, len(kept.ids))
    for start, end in (one.span for one in kept.media):
        first = end if start < first < end else first
        last = start if start < last < end else last
    mask = bytearray(kept.mask[first:last])
    if mask:
        mask[0] = 0
    if not any(mask):
        return None
    media = tuple(
        dataclasses.replace(one, start=one.start - first)
        for one in kept.media
        if first <= one.start and one.span[1] <= last
    )
    teacher = None if kept.teacher is None else kept.teacher.cut(first, last)
    return Kept(kept.row, kept.ids[first:last], bytes(mask), media, teacher)
