"""Guess the number: the environment says higher or lower until the guess is right.

user:      guess 1-16
assistant: 8
user:      higher
assistant: 12
user:      lower
assistant: 10
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from typing import Any


class GuessNumber:
    """An episode is worth 1 with the right number within `max_guesses`, else the share of the way that hints have gone.

    A guess is worth what it tells: with n numbers left before it and m after it (0 once it is right), the reward is
    log((n + 1) / (m + 1)) / log(largest + 1). The rewards of an episode add up to 1 where the number was found, and
    halving what is left gains most; a guess that cannot be right, or is no number, gains nothing.
    """

    def __init__(self, largest: int = 16, max_guesses: int = 5) -> None:
        """Args:
        largest: numbers are from 1 to this.
        max_guesses: after which the episode ends.
        """
        if largest < 2 or max_guesses < 1:
            raise ValueError(f"largest is {largest} and max_guesses {max_guesses}; use at least 2 and 1")
        self.largest, self.max_guesses = largest, max_guesses
        self.low, self.high = 1, largest
        self.number, self.num_guesses = 0, 0

    def reset(self, seed: int, row: Mapping[str, Any]) -> str:
        """Choose the number; the row's prompt has said what to do."""
        self.number = random.Random(seed).randint(1, self.largest)
        self.low, self.high, self.num_guesses = 1, self.largest, 0
        return ""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Compare the guess with the number."""
        self.num_guesses += 1
        guess = int(action) if re.fullmatch(r"\s*[0-9]{1,4}\s*", action) else None
        is_right = guess == self.number
        is_over = is_right or self.num_guesses == self.max_guesses
        facts = {"acc": is_right, "num_guesses": self.num_guesses}
        if guess is None:
            return "a number", 0.0, is_over, facts
        before = self.high - self.low + 1
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        after = 0 if is_right else self.high - self.low + 1
        reward = math.log((before + 1) / (after + 1)) / math.log(self.largest + 1)
        return "higher" if guess < self.number else "lower", reward, is_over, facts

    def anchor_state(self) -> str:
        """What the hints leave: two guesses with the same numbers left were made in the same state."""
        return f"{self.low}-{self.high}"

    def gold_action(self) -> str:
        """The middle of what is still possible."""
        return str((self.low + self.high) // 2)
