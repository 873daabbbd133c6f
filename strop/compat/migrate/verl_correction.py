"""verl's rollout correction: the section of today, `algorithm.rollout_is*` of late 2025, and the number of mid-2025."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from strop.compat.migrate.result import Facts, Outcome, UnreadableError, many, number, refuse, skip
from strop.compat.migrate.source import Found

_CORRECTION, _OURS = "algorithm.rollout_correction", "algorithm.correction"
_REJECTIONS_OF_2025 = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
_LEVELS = ("token", "sequence", "geometric")
_BESIDE = ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower", "rollout_token_veto_threshold")


def correction_weights(value: object, facts: Facts) -> Any:
    """Importance weights of tokens or samples."""
    if value not in ("token", "sequence", "geometric"):
        return refuse("strop's weights are token, sequence and geometric")
    if (
        facts.get(f"{_CORRECTION}.bypass_mode") is True
        and facts.get(f"{_CORRECTION}.loss_type") != "reinforce"
    ):
        return skip("with bypass_mode and ppo_clip, the ratio of the loss holds the weights already")
    return value


def correction_threshold(key: str, value: object, facts: Facts) -> Outcome:
    """The bound of the weights: one number truncates, a range masks."""
    if facts.get(f"{_CORRECTION}.rollout_is") is None:
        return skip("read with rollout_is alone")
    lower, upper = _read_range(value)
    if lower is None:
        return many({f"{_OURS}.upper": upper})
    return many({f"{_OURS}.mode": "mask", f"{_OURS}.lower": lower, f"{_OURS}.upper": upper}, "a range masks")


def correction_reject(key: str, value: object, facts: Facts) -> Outcome:
    """The statistics that reject, each with its bounds."""
    if value is None or value == "":
        return skip("not set")
    options = [_REJECTIONS_OF_2025.get(name.strip(), name.strip()) for name in str(value).split(",")]
    bounds: dict[str, Any] = {}
    turned = []
    for option, text in zip(options, _rejection_texts(len(options), facts), strict=True):
        lower, upper = _read_range(text)
        lower = facts.get(f"{_CORRECTION}.rollout_rs_threshold_lower") if lower is None else lower
        if not option.endswith("_k1"):
            bounds[option] = upper
            continue
        bounds[option] = upper if lower is None else [lower, upper]
        if lower is not None and abs(lower * upper - 1) > 0.02:
            turned.append(f"{option} [{1 / upper:.6g}, {1 / lower:.6g}]")
    note = f"verl's bounds act on the inverse ratio; to reject what it did: {', '.join(turned)}"
    return many({f"{_OURS}.reject": bounds}, note if turned else "")


def _rejection_texts(count: int, facts: Facts) -> list[Any]:
    """The threshold of each of `count` statistics."""
    threshold = facts.get(f"{_CORRECTION}.rollout_rs_threshold")
    if threshold is None:
        raise UnreadableError(f"{_CORRECTION}.rollout_rs_threshold is not set, and verl refuses that too")
    texts = (
        threshold
        if isinstance(threshold, list)
        else threshold.split(",")
        if isinstance(threshold, str)
        else [threshold]
    )
    if len(texts) not in (1, count):
        raise UnreadableError(f"{count} statistics and {len(texts)} thresholds: give one, or as many")
    return list(texts) if len(texts) == count else list(texts) * count


def old_cap(key: str, value: object, facts: Facts) -> Outcome:
    """The cap of mid-2025: truncated weights of tokens."""
    if not isinstance(value, int | float) or value <= 0:
        return skip("off there too")
    return many({f"{_OURS}.weights": "token", f"{_OURS}.upper": value})


def _read_range(value: object) -> tuple[float | None, float]:
    """(lower, upper) of a threshold: a number, its text, or `lower_upper`.

    Raises:
        UnreadableError: it is none of these.
    """
    try:
        if isinstance(value, bool) or value is None:
            raise ValueError
        lower, _, upper = str(value).strip().rpartition("_")
        return (float(lower) if lower else None), float(upper)
    except ValueError as error:
        raise UnreadableError(f"{value!r} would have to be a number, or two with _ between them") from error


def in_its_section(settings: Sequence[Found]) -> tuple[Found, ...]:
    """`algorithm.rollout_rs` and its like, of 2025, under the names that they have in the section."""
    names = {f"algorithm.{name}": f"{_CORRECTION}.{name}" for name in _BESIDE}
    return tuple(
        dataclasses.replace(setting, key=names[setting.key], written=setting.key)
        if setting.key in names
        else setting
        for setting in settings
    )


# algorithm.rollout_is and what stood beside it from October to November 2025.


def weights_of_2025(key: str, value: object, facts: Facts) -> Outcome:
    """Importance weights of the loss: a switch, beside a level, a mode and bounds."""
    level = value if value in _LEVELS else facts.get("algorithm.rollout_is_level")
    if value not in (True, *_LEVELS):
        return skip("the weights were measured there, and not used; how far both differ is always measured")
    threshold = facts.get("algorithm.rollout_is_threshold")
    if threshold is None:
        return skip("off there without algorithm.rollout_is_threshold")
    if level not in _LEVELS:
        return refuse("strop's weights are token, sequence and geometric")
    lower, upper = _read_range(threshold)
    ours: dict[str, Any] = {f"{_OURS}.weights": level, f"{_OURS}.upper": upper}
    mode = facts.get("algorithm.rollout_is_mode")
    if mode == "mask":
        lower_threshold = facts.get("algorithm.rollout_is_threshold_lower")
        lower = number(lower_threshold) if lower_threshold is not None else lower
        ours |= {f"{_OURS}.mode": "mask", f"{_OURS}.lower": 1 / upper if lower is None else lower}
    elif mode not in ("truncate", "clip"):
        return refuse("a weight beyond its bounds is cut to them or becomes 0: truncate or mask")
    return many(ours)


def weighs_as_2025(facts: Facts) -> bool:
    """The switch of 2025 is on, and has a bound."""
    is_on = facts.get("algorithm.rollout_is") in (True, *_LEVELS)
    return is_on and facts.get("algorithm.rollout_is_threshold") is not None


def veto(key: str, value: Any, facts: Facts) -> Outcome:
    """Samples are left out for one token whose ratio is far below 1."""
    if value is None:
        return skip("not set")
    if not 0 < number(value) < 1:
        raise UnreadableError(f"{value!r} would have to be a ratio between 0 and 1")
    bound = math.log(value) ** 2 / 2  # k2 of that ratio
    note = f"samples with a token whose ratio is below {value:g}, or above {1 / value:g}, which verl keeps"
    return many({f"{_OURS}.reject.seq_max_k2": float(f"{bound:.6g}")}, note)
