"""Which answers were given in the same state."""

from __future__ import annotations

import random

from strop.algorithms.advantages.anchor_groups import UNKNOWN, anchor_ids


def test_equal_texts_of_one_prompt_are_one_state() -> None:
    states = ["kitchen", "hall", "kitchen", "", "kitchen", ""]
    prompts = ["a", "a", "a", "a", "b", "b"]
    assert anchor_ids(states, prompts) == [1, 0, 1, UNKNOWN, 0, UNKNOWN]
    assert anchor_ids([], []) == []


def test_texts_that_are_alike_enough_are_one_state() -> None:
    # Of 10 and 10 characters 9 match at each step: 0.9. The first and the last share 8: 0.8.
    states = ["abcdefghij", "abcdefghiX", "abcdefghYX", "something!"]
    assert anchor_ids(states, "pppp", similarity=0.95) == [2, 1, 0, 3]
    # In alphabetical order: ...hYX is first, ...hiX is like it, ...hij is like ...hiX but not like the first.
    assert anchor_ids(states, "pppp", similarity=0.9) == [1, 0, 0, 2]
    assert anchor_ids(states, "pppp", similarity=0.8) == [0, 0, 0, 1]


def test_the_order_of_the_answers_does_not_matter() -> None:
    draw = random.Random(0)
    states = ["".join(draw.choices("ab", k=8)) for _ in range(40)]
    for similarity in (1.0, 0.7):
        numbers = anchor_ids(states, ["p"] * 40, similarity=similarity)
        order = draw.sample(range(40), 40)
        again = anchor_ids([states[n] for n in order], ["p"] * 40, similarity=similarity)
        assert again == [numbers[n] for n in order]
    assert len(set(numbers)) < len(set(states))


def test_states_that_share_many_common_characters_are_compared_whole() -> None:
    # Above 200 characters the matcher of the standard library would leave out those that are frequent.
    page = "ab" * 300
    assert anchor_ids([page, "c" + page], "pp", similarity=0.99) == [0, 0]
