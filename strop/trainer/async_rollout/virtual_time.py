"""How long things take in a run whose clock counts engine steps: trainer.clock_lengths and trainer.clock_latencies.

With trainer.clock=virtual and neither of them, an answer takes as many steps as it has tokens, and scoring takes none.
With them a run in one process has the schedule of one whose answers are long and whose scorers are slow: each sample
ends later, by a number that depends on the seed, its prompt and its number alone. Its tokens stay what they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from strop.trainer.sections import TrainerConfig
from strop.utils.rng import random_key, uniforms

_FORM = "lognormal(MEDIAN, SIGMA), or a file with one number per line"


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Of numbers of engine steps."""

    recorded: tuple[float, ...] = ()
    """Each as likely; empty: log-normal."""
    median: float = 0.0
    sigma: float = 0.0
    """Standard deviation of the logarithm."""

    def at(self, share: float) -> int:
        """The quantile of a share between 0 and 1, at least 0."""
        if self.recorded:
            return round(self.recorded[min(int(share * len(self.recorded)), len(self.recorded) - 1)])
        return round(math.exp(math.log(self.median) + self.sigma * NormalDist().inv_cdf(share)))


def read_distribution(key: str, given: str) -> Distribution | None:
    """What a setting names; None for an empty one.

    Args:
        key: of the setting, which errors name.
        given: `lognormal(MEDIAN, SIGMA)`, or the path of a file.

    Raises:
        ValueError: it is neither, or has numbers that no time has.
    """
    if not given:
        return None
    name, bracket, rest = given.partition("(")
    if bracket and name.strip() == "lognormal" and rest.endswith(")"):
        numbers = _numbers(key, given, rest[:-1].split(","))
        if len(numbers) != 2 or numbers[0] == 0:
            raise ValueError(
                f"{key} is {given!r}: a log-normal distribution has a median above 0 and a sigma"
            )
        return Distribution(median=numbers[0], sigma=numbers[1])
    try:
        lines = Path(given).expanduser().read_text().split()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{key} is {given!r}, which cannot be read ({error}); it is {_FORM}") from None
    if not lines:
        raise ValueError(f"{key} is {given!r}, a file without a number; it is {_FORM}")
    return Distribution(recorded=tuple(sorted(_numbers(key, given, lines))))


def _numbers(key: str, given: str, texts: list[str]) -> list[float]:
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        numbers = [math.nan]
    if not all(0 <= number < 1e9 for number in numbers):
        raise ValueError(f"{key} is {given!r}, which has something that is no number of steps; it is {_FORM}")
    return numbers


@dataclass(frozen=True, kw_only=True)
class VirtualTime:
    """How much later a sample ends than its tokens say."""

    seed: int
    """Of the run."""
    lengths: Distribution | None = None
    """Of the tokens that answers take the time of, where that is more than they have."""
    latencies: Distribution | None = None
    """Of the time between an answer's end and its score."""

    def steps_after(self, uid: str, sample_index: int, num_tokens: int) -> int:
        """Engine steps from a sample's last token to its end.

        Args:
            uid, sample_index: of the sample.
            num_tokens: that it has.
        """
        length = self._drawn(self.lengths, "clock lengths", uid, sample_index)
        return max(length - num_tokens, 0) + self._drawn(self.latencies, "clock latencies", uid, sample_index)

    def _drawn(self, among: Distribution | None, purpose: str, uid: str, sample_index: int) -> int:
        if among is None:
            return 0
        key = random_key(self.seed, purpose, uid, sample_index)
        return among.at(float(uniforms(np.array([key], dtype=np.uint64), np.array([0]))[0]))


def virtual_time(trainer: TrainerConfig) -> VirtualTime | None:
    """How long things take by a clock that counts engine steps; None where that on the wall counts.

    Raises:
        ValueError: a distribution is none, or is for another clock.
    """
    found, settings = {}, trainer
    for key, given in (("lengths", settings.clock_lengths), ("latencies", settings.clock_latencies)):
        if given and settings.clock == "wall":
            raise ValueError(
                f"trainer.clock_{key} is for a clock that counts engine steps: set trainer.clock=virtual, or remove it"
            )
        found[key] = read_distribution(f"trainer.clock_{key}", given)
    return VirtualTime(seed=trainer.seed, **found) if settings.clock == "virtual" else None
