"""Prompts with media: spans that are whole and in order, and token ids that carry their media."""

from __future__ import annotations

import copy
import pickle

import pytest

from strop.trajectory import Media, MediaTokens, Prompt, media_of


def medium(start: int, num_tokens: int = 3) -> Media:
    return Media(
        kind="image",
        parts=(b"png",),
        size=(8, 8),
        grid=(1, 2, 6),
        start=start,
        num_tokens=num_tokens,
        key="k",
    )


def prompt(*media: Media) -> Prompt:
    return Prompt(
        uid="e0-000004",
        row=4,
        token_ids=tuple(range(10)),
        messages=({"role": "user", "content": "a"},),
        data_source="s",
        ground_truth="t",
        media=media,
    )


def test_media_next_to_each_other_and_at_the_end_are_whole() -> None:
    assert [one.span for one in prompt(medium(1), medium(4), medium(7)).media] == [(1, 4), (4, 7), (7, 10)]


@pytest.mark.parametrize(
    "media", [(medium(8),), (medium(4), medium(1)), (medium(1), medium(3)), (medium(-1),)]
)
def test_media_that_are_cut_overlap_or_stand_in_another_order_are_refused(media: tuple[Media, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"e0-000004 \(dataset row 4\) has 10 tokens, but its image is said to"
    ):
        prompt(*media)


def test_token_ids_carry_their_media_and_are_token_ids_still() -> None:
    tokens = MediaTokens([5, 6, 7], [medium(0)])
    assert tokens == (5, 6, 7)
    assert media_of(tokens) == (medium(0),)
    assert media_of((5, 6, 7)) == ()
    for other in (copy.copy(tokens), pickle.loads(pickle.dumps(tokens))):
        assert (other, media_of(other)) == ((5, 6, 7), (medium(0),))
