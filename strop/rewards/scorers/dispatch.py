"""Registry of the built-in scorers by data source."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from strop.rewards.scorers import (
    choice,
    code,
    countdown,
    exact,
    geometry,
    gsm8k,
    math_boxed,
    math_dapo,
    reasoning_gym,
    search_qa,
)

Graded = Mapping[str, Any]
"""Result of a scorer: `score`, `acc` (whether it is right) and `pred` (the answer it read)."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    grade: Callable[..., Graded]
    """Called as grade(solution_str, ground_truth, **kwargs)."""
    packages: tuple[str, ...] = ()
    """Third-party packages it imports on first use."""
    needs_row: bool = False
    """True: it is also given data_source and extra_info."""
    start: Callable[[], object] | None = None
    """Starts what it needs, once per process."""


_CODE = Scorer(grade=code.grade, start=code.start)
_COUNTDOWN = Scorer(grade=countdown.grade)
_EXACT = Scorer(grade=exact.grade)
_GSM8K = Scorer(grade=gsm8k.grade)
_BOXED = Scorer(grade=math_boxed.grade, packages=("math_verify",), start=math_boxed.start)
_DAPO = Scorer(grade=math_dapo.grade, packages=("math_verify",), start=math_boxed.start)
_GEOMETRY = Scorer(grade=geometry.grade, packages=("math_verify",), start=math_boxed.start)
_CHOICE = Scorer(grade=choice.grade, needs_row=True)
_SEARCH = Scorer(grade=search_qa.grade)
_GYM = Scorer(grade=reasoning_gym.grade, packages=("reasoning_gym",), needs_row=True)

_BY_NAME = {
    "apps": _CODE,
    "codecontests": _CODE,
    "codeforces": _CODE,
    "taco": _CODE,
    "countdown": _COUNTDOWN,
    "openai/gsm8k": _GSM8K,
    "lighteval/MATH": _BOXED,
    "DigitalLearningGmbH/MATH-lighteval": _BOXED,
    "HuggingFaceH4/MATH-500": _BOXED,
    "hiyouga/geometry3k": _GEOMETRY,
    "cais/mmlu": _CHOICE,
    "Idavidrein/gpqa": _CHOICE,
    "TIGER-Lab/MMLU-Pro": _CHOICE,
    **{f"{search_qa.PREFIX}{name}": _SEARCH for name in search_qa.SOURCES},
    "math_dapo": _DAPO,
    "math_dapo_reasoning": _DAPO,
    "strop/exact": _EXACT,
}
_BY_PREFIX = {"aime": _DAPO, "choice": _CHOICE, "exact": _EXACT, reasoning_gym.PREFIX: _GYM}


def known_data_sources() -> list[str]:
    """Every name with a built-in scorer; a trailing `*` stands for any ending."""
    return sorted(_BY_NAME) + sorted(f"{prefix}*" for prefix in _BY_PREFIX)


def has_scorer(data_source: str) -> bool:
    """The source has a built-in scorer."""
    return data_source in _BY_NAME or data_source.startswith(tuple(_BY_PREFIX))


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
    """Import and start what the scorer of this data source needs, so that the first sample does not pay for it."""
    scorer = _find(data_source)
    for package in scorer.packages:
        importlib.import_module(package)
    if scorer.start is not None:
        scorer.start()


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: object = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> Graded:
    """Score an answer by the rule of its data source.

    Args:
        data_source: which rule; see `known_data_sources`.
        solution_str: the model's whole response as text. It is only read, never evaluated.
        ground_truth: the right answer, in the form the rule expects.
        extra_info: the row's free dictionary.
        sandbox_fusion_url, concurrent_semaphore, memory_limit_mb: None; they are settings of reward.sandbox here, and
            named so that functions written for verl can pass theirs on.
        kwargs: options of that rule, for example method="flexible" for GSM8K.

    Returns:
        A dictionary with `score`, `acc` and `pred`.

    Raises:
        ValueError: no rule for this data source; the message lists the known ones. Or a setting of the sandbox.
    """
    for name, value, key in (
        ("sandbox_fusion_url", sandbox_fusion_url, "url"),
        ("concurrent_semaphore", concurrent_semaphore, "max_concurrent"),
        ("memory_limit_mb", memory_limit_mb, "limits.memory_mib"),
    ):
        if value is not None:
            raise ValueError(
                f"{name} is {value!r}; set reward.sandbox.{key} instead, and leave the argument out"
            )
    scorer = _find(data_source)
    if scorer.needs_row:
        kwargs = {"data_source": data_source, "extra_info": extra_info or {}, **kwargs}
    return scorer.grade(solution_str, ground_truth, **kwargs)
