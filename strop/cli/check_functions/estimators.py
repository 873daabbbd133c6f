"""`strop check estimator`: an advantage estimator on small float64 batches, and on variations of them.

These are the rules that catch most mistakes; the whole contract is in tests/algorithms/contract.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.algorithms.advantages import AdvantageFn, call_estimator, get_adv_estimator_fn, verl_convention
from strop.algorithms.registry import Declaration
from strop.algorithms.specs import adv_estimator_declaration
from strop.cli.check_functions.findings import RuleBreach
from strop.utils.registry import name_of

SHARED_DEFAULTS: Mapping[str, object] = {"norm_by_std": True, "gamma": 0.9, "lam": 0.8}
"""Shared settings unless others are given; below 1, so that a forgotten discount shows."""
NUM_BATCHES = 4
TOLERANCE = 1e-9
"""Largest difference between numbers that differ by rounding; whitening magnifies 1e-16 by up to 1e4."""
GARBAGE = 37.5
"""Stands outside the mask; any finite number will do."""
INSIDE_ONLY = (
    "values", "old_log_probs", "ref_log_prob", "sum_pi_squared", "rollout_is_weights", "process_rewards",
)  # fmt: skip
"""Columns [B, R] that count inside the mask alone."""

Columns = dict[str, Tensor]


def example_columns(seed: int) -> Columns:
    """Every column that an estimator may take: given tokens between sampled ones, rows without a sampled token."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, width = 8, 6

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(0, width + 1, (num_rows, 1), generator=generator)
    lengths[:2] = width  # at least two rows have a token to whiten
    inside = torch.arange(width)[None] < lengths
    mask = inside & (uniform(num_rows, width) < 0.75)
    mask[:2, 0] = True
    # Never before the first sampled token, which would have nobody to credit.
    is_rewarded = inside & (uniform(num_rows, width) < 0.5) & (mask.cumsum(dim=-1) > 0)
    log_probs = -0.05 - 2 * uniform(num_rows, width)
    parts = [torch.randperm(num_rows, generator=generator).to(torch.float64) / 8 for _ in range(3)]
    columns = {
        "response_mask": mask,
        "group_ids": torch.tensor([5, 5, 8, 5, 8, 11, 8, 11]),
        "values": uniform(num_rows, width),
        "old_log_probs": log_probs,
        "ref_log_prob": log_probs - 0.25,
        "sum_pi_squared": (2 * log_probs).exp() + 0.1 * uniform(num_rows, width),
        "rollout_is_weights": 0.5 + uniform(num_rows, width),
        "reward_baselines": uniform(num_rows),
        "reward_parts": torch.stack(parts, dim=1),
        "sample_index": torch.arange(num_rows) // 2,
        "turn_index": torch.arange(num_rows) % 2,
        "anchor_ids": torch.randint(-1, 2, (num_rows,), generator=generator),
        "process_rewards": uniform(num_rows, width) - 0.5,
    }
    return _rewarded(columns, torch.where(is_rewarded, uniform(num_rows, width), 0.0))


def _rewarded(columns: Columns, token_level_rewards: Tensor) -> Columns:
    sums = token_level_rewards.sum(dim=-1)
    return {**columns, "token_level_rewards": token_level_rewards, "rewards": sums, "turn_rewards": sums}


def check_adv_estimator(
    estimator: str | Enum | AdvantageFn, *, settings: Mapping[str, object] | None = None
) -> list[RuleBreach]:
    """Rules that the estimator breaks, each at most once, with the first batch that shows it; none: it keeps all.

    Args:
        estimator: a registered name, or a function whose signature says whether it takes columns of ours by keyword,
            or follows verl's calling convention.
        settings: by name, as in `estimate_advantages`; the shared ones default to `SHARED_DEFAULTS`.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(estimator, str | Enum):
        name, function = name_of(estimator), get_adv_estimator_fn(estimator)
        declaration = adv_estimator_declaration(estimator)
    else:
        name, function = getattr(estimator, "__name__", repr(estimator)), estimator
        declaration = inferred_declaration(estimator)
    numbers = {**SHARED_DEFAULTS, **(settings or {})}
    has_parts = not isinstance(estimator, str | Enum) or "reward_parts" in declaration.needs

    def estimate(columns: Columns) -> Tensor:
        if declaration.is_user_convention and has_parts:
            return verl_convention.estimate(
                function, declaration, columns, numbers, None, None, objects=AnyPart
            )[0]
        return call_estimator(name, function, declaration, columns=columns, settings=numbers)[0]

    findings: dict[str, RuleBreach] = {}
    for seed in range(NUM_BATCHES):
        # What the function raises is a finding, not our failure.
        try:
            for rule, sentence in _breaches(estimate, example_columns(seed), declaration.is_group_relative):
                findings.setdefault(rule, RuleBreach(rule, f"{name}: {sentence}"))
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            findings["it runs"] = RuleBreach("it runs", f"{name} raised {type(error).__name__}: {error}")
            break
    return list(findings.values())


class AnyPart(verl_convention.RowObjects):
    """`non_tensor_batch` with a part of the reward of every name, since algorithm.reward_keys is the run's."""

    parts: Tensor

    @classmethod
    def of(cls, uids: NDArray[np.object_], parts: Tensor | None, keys: Sequence[str]) -> AnyPart:
        """As of RowObjects."""
        objects = cls(uid=uids)
        assert parts is not None, "example_columns has them"
        objects.parts = parts
        return objects

    def __missing__(self, name: str) -> NDArray[np.object_]:
        column = self.parts[:, (len(self) - 1) % self.parts.shape[1]]
        return self.setdefault(name, np.array(column.tolist(), dtype=object))


def inferred_declaration(function: AdvantageFn) -> Declaration:
    """A function whose required parameters are all columns of ours declares them; any other follows verl's
    convention."""
    parameters = inspect.signature(function).parameters
    required = {
        name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty
    }
    if parameters.keys() & {"config", "index", "kwargs"} or not required <= example_columns(0).keys():
        return Declaration()
    return Declaration(needs=frozenset(required), is_group_relative="group_ids" in required)


def _breaches(
    estimate: Callable[[Columns], Tensor], columns: Columns, compares_groups: bool
) -> Iterator[tuple[str, str]]:
    """Broken rules on one batch, each with a sentence."""
    mask, copies = columns["response_mask"], {name: column.clone() for name, column in columns.items()}
    expected = estimate(copies)
    for name, column in columns.items():
        if not torch.equal(copies[name], column):
            yield (
                "inputs stay as they are",
                f"the call changed {name} in place; the trainer uses the columns again",
            )
    if expected.dtype != torch.float64:
        yield "float64 and finite", f"float64 columns gave advantages of {expected.dtype}"
    if not torch.isfinite(expected).all():
        non_finite = expected[~torch.isfinite(expected)].tolist()[:4]
        yield "float64 and finite", f"finite columns gave the advantages {non_finite}"
        return
    outside = expected[~mask]
    if outside.any():
        yield (
            "zero outside the mask",
            f"a token outside the mask has advantage {outside[outside != 0][0]:g}",
        )
    yield from _changed_by_nothing(estimate, columns, expected)
    yield from _misjudged(estimate, columns, compares_groups)


def _changed_by_nothing(
    estimate: Callable[[Columns], Tensor], columns: Columns, expected: Tensor
) -> Iterator[tuple[str, str]]:
    """Of changes that are to change no advantage, those that do."""
    mask = columns["response_mask"]

    def differs(changed: Columns, reference: Tensor, change: str) -> Iterator[str]:
        result = estimate(changed)[:, : mask.shape[1]]
        apart = (result - reference).abs() > TOLERANCE * reference.abs().clamp(min=1.0)
        for row, column in apart.nonzero().tolist()[:1]:
            yield (
                f"with {change}, the advantage of row {row}, token {column} is {result[row, column].item():g} where "
                f"{reference[row, column].item():g} was expected"
            )

    filled = {name: torch.where(mask, columns[name], GARBAGE) for name in INSIDE_ONLY}
    change = "other values, log-probs or weights outside the mask"
    for sentence in differs({**columns, **filled}, expected, change):
        yield "values outside the mask never matter", sentence
    padding = dict.fromkeys(INSIDE_ONLY, GARBAGE) | {"response_mask": 0.0, "token_level_rewards": 0.0}
    wide = {
        name: torch.nn.functional.pad(column, (0, 2), value=padding[name]) if name in padding else column
        for name, column in columns.items()
    }
    for sentence in differs(wide, expected, "two columns of padding on the right"):
        yield "padding never matters", sentence
    order = torch.tensor([6, 3, 0, 7, 2, 5, 1, 4])
    shuffled = {name: column[order] for name, column in columns.items()}
    for sentence in differs(shuffled, expected[order], "rows in another order"):
        yield "the order of rows never matters", sentence
    last = torch.where(mask, torch.arange(mask.shape[1]), -1).cummax(dim=-1).values.clamp(min=0)
    rewards = columns["token_level_rewards"]
    moved = torch.zeros_like(rewards).scatter_add(1, last, rewards)
    change = "rewards moved from given tokens to the sampled token before each"
    for sentence in differs(_rewarded(columns, moved), expected, change):
        yield "a reward counts wherever it sits", sentence


def _misjudged(
    estimate: Callable[[Columns], Tensor], columns: Columns, compares_groups: bool
) -> Iterator[tuple[str, str]]:
    """The worse one of two answers that is preferred, and an answer without another one that has an advantage."""
    better, worse = estimate(_twins(columns))[:, -1].tolist()
    if better < worse:
        yield (
            "a higher reward has the higher advantage",
            f"of two answers to one prompt, reward 1 got the advantage {better:g} and reward 0 got {worse:g}",
        )
    if compares_groups:
        alone = torch.cat([columns["group_ids"][:-1], torch.tensor([999])])
        mask = columns["response_mask"]
        with_token = torch.cat([mask[:-1], mask[:1]])
        advantage = (
            estimate({**columns, "group_ids": alone, "response_mask": with_token})[-1].abs().max().item()
        )
        if advantage:
            yield (
                "a group of one has advantage 0",
                f"the only sample of a prompt has advantage {advantage:g}: it has nothing to be compared with",
            )


def _twins(columns: Columns) -> Columns:
    """Two answers to one prompt that differ in nothing but their reward."""
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    twins = {name: column[:1].repeat(2, *[1] * (column.dim() - 1)) for name, column in columns.items()}
    twins |= {name: torch.full((2, 2), 0.5, dtype=torch.float64) for name in INSIDE_ONLY}
    twins |= {
        name: torch.full((2, 2), -1.0, dtype=torch.float64) for name in ("old_log_probs", "ref_log_prob")
    }
    parts = torch.tensor([[1.0] * 3, [0.0] * 3], dtype=torch.float64)
    twins |= {"response_mask": torch.ones(2, 2, dtype=torch.bool), "reward_parts": parts}
    return _rewarded({**twins, "sample_index": torch.arange(2)}, rewards)
