"""Which built-in scorer belongs to a data source."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from strop.rewards.scorers import exact, gsm8k, math_boxed, math_dapo, reasoning_gym

Graded = Mapping[str, Any]
"""What a scorer returns: `score`, `acc` (whether it is right) and `pred` (the answer it read)."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    grade: Callable[..., Graded]
    """Called as grade(solution_str, ground_truth, **kwargs)."""
    packages: tuple[str, ...] = ()
    """Third-party packages it imports on first use."""
    needs_row: bool = False
    """True: it is also given data_source and extra_info."""


_EXACT = Scorer(grade=exact.grade)
_GSM8K = Scorer(grade=gsm8k.grade)
_BOXED = Scorer(grade=math_boxed.grade, packages=("math_verify",))
_DAPO = Scorer(grade=math_dapo.grade, packages=("math_verify",))
_GYM = Scorer(grade=reasoning_gym.grade, packages=("reasoning_gym",), needs_row=True)

_BY_NAME = {
    "openai/gsm8k": _GSM8K,
    "lighteval/MATH": _BOXED,
    "DigitalLearningGmbH/MATH-lighteval": _BOXED,
    "HuggingFaceH4/MATH-500": _BOXED,
    "math_dapo": _DAPO,
    "math_dapo_reasoning": _DAPO,
    "strop/exact": _EXACT,
}
_BY_PREFIX = {"aime": _DAPO, "exact": _EXACT, reasoning_gym.PREFIX: _GYM}


def known_data_sources() -> list[str]:
    """Every name with a built-in scorer; a trailing `*` stands for any ending."""
    return sorted(_BY_NAME) + sorted(f"{prefix}*" for prefix in _BY_PREFIX)


def _find(data_source: str) -> Scorer:
    if data_source in _BY_NAME:
        return _BY_NAME[data_source]
    for prefix, scorer in _BY_PREFIX.items():
        if data_source.startswith(prefix):
            return scorer
    raise ValueError(
        f"no built-in scorer for data_source {data_source!r}; known: {', '.join(known_data_sources())}. Set "
        f"reward.path to a file with your own compute_score, or name a known data_source in the data"
    )


def prepare(data_source: str) -> None:
    """Import what the scorer of this data source needs, so that the first sample does not pay for it."""
    for package in _find(data_source).packages:
        importlib.import_module(package)


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Graded:
    """Score an answer by the rule of its data source.

    Args:
        data_source: which rule; see `known_data_sources`.
        solution_str: the model's whole response as text. It is only read, never evaluated.
        ground_truth: the right answer, in the form the rule expects.
        extra_info: the row's free dictionary.
        kwargs: options of that rule, for example method="flexible" for GSM8K.

    Returns:
        A dictionary with `score`, `acc` and `pred`.

    Raises:
        ValueError: no rule for this data source; the message lists the known ones.
    """
    scorer = _find(data_source)
    if scorer.needs_row:
        kwargs = {"data_source": data_source, "extra_info": extra_info or {}, **kwargs}
    return scorer.grade(solution_str, ground_truth, **kwargs)
