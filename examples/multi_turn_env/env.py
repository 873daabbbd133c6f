"""Guess the number: the environment says higher or lower until the guess is right.

user:      guess 1-16
assistant: 8
user:      higher
assistant: 12
user:      lower
assistant: 10
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any


class GuessNumber:
    """1 for the right number within `max_guesses`; a guess that the hints had ruled out, or no number, loses a little."""

    def __init__(self, largest: int = 16, max_guesses: int = 5, waste_reward: float = -0.2) -> None:
        """Args:
        largest: numbers are from 1 to this.
        max_guesses: after which the episode ends.
        waste_reward: of a guess that cannot be right, at most 0.
        """
        if largest < 2 or max_guesses < 1:
            raise ValueError(f"largest is {largest} and max_guesses {max_guesses}; use at least 2 and 1")
        if waste_reward > 0:
            raise ValueError(f"waste_reward is {waste_reward}; use at most 0")
        self.largest, self.max_guesses, self.waste_reward = largest, max_guesses, waste_reward
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
            return "a number", self.waste_reward, is_over, facts
        reward = 1.0 if is_right else 0.0 if self.low <= guess <= self.high else self.waste_reward
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        hint = "higher" if guess < self.number else "lower"
        return hint, reward, is_over, facts

    def gold_action(self) -> str:
        """The middle of what is still possible."""
        return str((self.low + self.high) // 2)
