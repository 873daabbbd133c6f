"""Prompts with media: spans that are whole and in order, and token ids that carry their media."""

from __future__ import annotations

import copy
import pickle

import pytest

from strop.protocol.trajectory import Media, MediaTokens, Prompt, Trajectory, media_of


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


def trajectory(*media: Media) -> Trajectory:
    """Three tokens of prompt, an image at [1, 3)."""
    return Trajectory(uid="e0-000004", sample_index=0, prompt_ids=(1, 2, 2), media=media)


def test_given_tokens_bring_their_media_counted_from_the_first_token_of_the_prompt() -> None:
    grown = trajectory(medium(1, 2)).with_sampled([7, 8], [-0.5, -1.0], [0, 0])
    grown = grown.with_given(MediaTokens([9, 2, 2, 2, 9], [medium(1)])).with_given([5])
    assert [one.span for one in grown.media] == [(1, 3), (6, 9)]
    assert media_of(grown.token_ids) == grown.media
    assert grown.token_ids == (1, 2, 2, 7, 8, 9, 2, 2, 2, 9, 5)
    assert not isinstance(trajectory().with_given([9]).token_ids, MediaTokens)


def test_media_beyond_the_tokens_of_a_trajectory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trajectory e0-000004/0 has 3 tokens, but its image .* \[1, 4\]"):
        trajectory(medium(1))


# Places in the response: 0 and 1 sampled, 2 given, an image at 3 to 5, 6 given, an image at 7 to 9, 10 given.
@pytest.mark.parametrize(
    ("max_tokens", "num_tokens", "num_media"),
    [
        (11, 11, 3),
        (99, 11, 3),
        (10, 7, 2),  # the second image would be the last thing
        (8, 7, 2),
        (7, 7, 2),
        (6, 3, 1),  # and so the first
        (4, 3, 1),
        (3, 3, 1),
        (1, 1, 1),
        (0, 0, 1),
    ],
)
def test_a_cut_leaves_whole_images_and_something_behind_each(
    max_tokens: int, num_tokens: int, num_media: int
) -> None:
    given = MediaTokens([9, 2, 2, 2, 9, 2, 2, 2, 9], [medium(1), medium(5)])
    whole = trajectory(medium(1, 2)).with_sampled([7, 8], [-0.5, -1.0], [0, 0]).with_given(given)
    kept = whole.truncate(max_tokens)
    assert kept.response_ids == whole.response_ids[:num_tokens]
    assert kept.log_probs == whole.log_probs[:num_tokens]
    assert kept.media == whole.media[:num_media]


def test_a_cut_reaches_back_over_images_next_to_each_other() -> None:
    given = MediaTokens([9, 2, 2, 2, 2, 2, 2, 9], [medium(1), medium(4)])
    assert trajectory().with_given(given).truncate(7).response_ids == (9,)
