from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.utils.rng import permutation, random_key, uniforms

KEYS = st.integers(min_value=0, max_value=2**64 - 1)


def test_uniforms_are_the_upper_bits_of_published_splitmix64_words() -> None:
    # The first five words of splitmix64 from state 1234567, as printed in public descriptions of it.
    words = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    expected = np.array([((word >> 12) + 0.5) / 2**52 for word in words])
    keys = np.full(5, 1234567, dtype=np.uint64)
    np.testing.assert_array_equal(uniforms(keys, np.arange(5)), expected)


@settings(max_examples=50, deadline=None)
@given(key=KEYS, position=st.integers(min_value=0, max_value=2**40))
def test_uniforms_lie_strictly_inside_the_unit_interval(key: int, position: int) -> None:
    number = uniforms(np.array([key], dtype=np.uint64), np.array([position]))
    assert 0.0 < number[0] < 1.0


def test_the_largest_word_still_gives_a_number_below_one() -> None:
    # (2**52 - 1 + 0.5) / 2**52 is 1 - 2**-53, a float64; one more bit of the word would round to 1.0.
    assert ((2**64 - 1 >> 12) + 0.5) * 2.0**-52 == 1 - 2.0**-53 < 1.0


@settings(max_examples=25, deadline=None)
@given(keys=st.lists(KEYS, min_size=2, max_size=8), shift=st.integers(0, 7))
def test_a_uniform_does_not_depend_on_its_neighbours(keys: list[int], shift: int) -> None:
    array = np.array(keys, dtype=np.uint64)
    positions = np.arange(len(keys)) * 3
    together = uniforms(array, positions)
    at = shift % len(keys)
    alone = uniforms(array[at : at + 1], positions[at : at + 1])
    assert together[at] == alone[0]


def test_uniforms_of_related_keys_look_independent_and_uniform() -> None:
    keys = np.array([random_key(0, "sampling", "e0-000001", i) for i in range(2000)], dtype=np.uint64)
    numbers = uniforms(keys[:, None], np.arange(20)[None, :])  # [2000, 20]
    # Mean 1/2 with standard error 1/sqrt(12 * 40000) = 0.00144; variance 1/12.
    assert abs(numbers.mean() - 0.5) < 5 * 0.00144
    assert abs(numbers.var() - 1 / 12) < 0.002
    across = np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]
    assert abs(across) < 0.03


def test_random_key_is_the_same_in_another_process() -> None:
    code = "from strop.utils.rng import random_key; print(random_key(7, 'sampling', 'e0-000003', 5))"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "99"}
    )
    assert int(other.stdout) == random_key(7, "sampling", "e0-000003", 5)


def test_random_key_keeps_parts_apart() -> None:
    keys = {
        random_key(0, "a", "bc"),
        random_key(0, "ab", "c"),
        random_key(0, "abc"),
        random_key(0, "a", "b", "c"),
        random_key(0, "a", 1),
        random_key(0, "a", "1"),
        random_key(1, "a", "bc"),
        random_key(0, "a", "1:s", "x"),
        random_key(0, "a", "1", "s1:x"),
    }
    assert len(keys) == 9
    assert all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize("part", [1.5, None, True])
def test_random_key_refuses_other_types(part: object) -> None:
    with pytest.raises(TypeError, match="strings and integers, got"):
        random_key(0, "a", part)  # type: ignore[arg-type]


def test_numpy_integers_give_the_key_of_the_python_integer() -> None:
    assert random_key(0, "a", np.int64(3)) == random_key(0, "a", 3)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(key=KEYS, n=st.integers(0, 200))
def test_permutation_holds_each_number_once_and_depends_on_its_key(key: int, n: int) -> None:
    order = permutation(key, n)
    assert sorted(order.tolist()) == list(range(n))
    assert order.tolist() == permutation(key, n).tolist()
    if n > 20:
        assert order.tolist() != permutation(key ^ 1, n).tolist()


def test_each_first_place_of_a_permutation_is_equally_likely() -> None:
    firsts = np.bincount([permutation(random_key(i, "order"), 4)[0] for i in range(2000)], minlength=4)
    # Binomial(2000, 1/4): mean 500, standard deviation 19.4.
    assert (abs(firsts - 500) < 5 * 19.4).all()


def test_permutation_refuses_a_negative_length() -> None:
    with pytest.raises(ValueError, match="at least 0, got -1"):
        permutation(0, -1)
