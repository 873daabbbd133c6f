"""One tokenised conversation: as it is trained, and stored in little memory; cutting of one that is too long."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from strop.protocol.trajectory import Media

if TYPE_CHECKING:
    from strop.engines.multimodal.placeholders import RowMedia


@dataclass(frozen=True, eq=False)
class TeacherTop:
    """Logged top tokens of a teacher at the position of each token of an answer."""

    start: int
    """Number of the first token with logged ones; all from there on have them."""
    ids: NDArray[np.int32]
    """[tokens, K]: ids of the top tokens."""
    log_probs: NDArray[np.float32]
    """[tokens, K]: their log-probs, at temperature 1."""

    def cut(self, first: int, last: int) -> TeacherTop:
        """The part for the tokens from `first` up to `last`."""
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
    """Top tokens of a teacher, from its `start` on."""

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
class StoredConversation:
    """A conversation, in little memory."""

    row: int
    ids: array[int]
    mask: bytes
    media: tuple[Media, ...] = ()
    teacher: TeacherTop | None = None

    def example(self) -> SftExample:
        """The conversation as it is trained."""
        return SftExample(
            row=self.row,
            token_ids=tuple(self.ids),
            loss_mask=tuple(map(bool, self.mask)),
            media=self.media,
            teacher=self.teacher,
        )


def longest_parts(conversations: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Tokens of the longest conversation before its first trained token, and from there on; of several that are as
    long, of the one with the longest answer.

    Args:
        conversations: tokens of each, and the place of the first trained one.
    """
    length, begin = max(conversations, key=lambda one: (one[0], -one[1]))
    prompt = max(begin, 1)
    return prompt, length - prompt


def with_images(conversation: StoredConversation, images: RowMedia) -> StoredConversation:
    """Expand the placeholder of each image to its tokens, none of them trained."""
    ids = images.expand(conversation.ids)
    media = images.media(ids)
    mask, read = bytearray(), 0
    for image in media:
        before = image.start - len(mask)
        mask += conversation.mask[read : read + before] + bytes(image.num_tokens)
        read += before + 1  # the token that the template wrote for it
    return StoredConversation(conversation.row, ids, bytes(mask + conversation.mask[read:]), media)


def cut(
    conversation: StoredConversation, limit: int, side: Literal["left", "right"]
) -> StoredConversation | None:
    """Cut a conversation to at most `limit` tokens, without a part of an image; None where none of them is trained.

    The first token of all is not trained: nothing predicts it.
    """
    first, last = (0, limit) if side == "right" else (len(conversation.ids) - limit, len(conversation.ids))
    for start, end in (image.span for image in conversation.media):
        first = end if start < first < end else first
        last = start if start < last < end else last
    mask = bytearray(conversation.mask[first:last])
    if mask:
        mask[0] = 0
    if not any(mask):
        return None
    media = tuple(
        dataclasses.replace(image, start=image.start - first)
        for image in conversation.media
        if first <= image.start and image.span[1] <= last
    )
    teacher = None if conversation.teacher is None else conversation.teacher.cut(first, last)
    return StoredConversation(conversation.row, conversation.ids[first:last], bytes(mask), media, teacher)
