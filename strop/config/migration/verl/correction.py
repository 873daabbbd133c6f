"""verl's rollout correction: the section of today, its names of 2025, and the single number of mid-2025."""

from __future__ import annotations

from typing import Any

from strop.config.migration.outcomes import Facts, Outcome, UnreadableError, many, refuse, skip
from strop.config.migration.rules import NotNeeded, To, Unless, WhenTrue
from strop.config.migration.tables import Entry, same, under
from strop.config.migration.values import if_set
from strop.config.migration.verl.facts import A

SECTION = "algorithm.rollout_correction"
_OURS = "algorithm.correction"
_LEGACY_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Names of rejections in 2025."""


def _weights(value: Any, facts: Facts) -> Any:
    if value not in ("token", "sequence", "geometric"):
        return refuse("strop's weights are token, sequence and geometric")
    if facts.get(f"{SECTION}.bypass_mode") is True and facts.get(f"{SECTION}.loss_type") != "reinforce":
        return skip("with bypass_mode and ppo_clip, the ratio of the loss holds the weights already")
    return value


def _threshold(key: str, value: Any, facts: Facts) -> Outcome:
    if facts.get(f"{SECTION}.rollout_is") is None:
        return skip("read with rollout_is alone")
    lower, upper = _read_range(value)
    if lower is None:
        return many({f"{_OURS}.upper": upper})
    return many({f"{_OURS}.mode": "mask", f"{_OURS}.lower": lower, f"{_OURS}.upper": upper}, "a range masks")


def _lower(value: Any, facts: Facts) -> Outcome:
    return many({f"{_OURS}.mode": "mask", f"{_OURS}.lower": value})


def _reject(key: str, value: Any, facts: Facts) -> Outcome:
    if value is None or value == "":
        return skip("not set")
    options = [_LEGACY_REJECTIONS.get(name.strip(), name.strip()) for name in str(value).split(",")]
    texts = _rejection_texts(len(options), facts)
    bounds: dict[str, Any] = {}
    turned = []
    for option, text in zip(options, texts, strict=True):
        lower, upper = _read_range(text)
        lower = facts.get(f"{SECTION}.rollout_rs_threshold_lower") if lower is None else lower
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
    given = facts.get(f"{SECTION}.rollout_rs_threshold")
    if given is None:
        raise UnreadableError(f"{SECTION}.rollout_rs_threshold is not set, and verl refuses that too")
    texts = given if isinstance(given, list) else given.split(",") if isinstance(given, str) else [given]
    if len(texts) not in (1, count):
        raise UnreadableError(f"{count} statistics and {len(texts)} thresholds: give one, or as many")
    return list(texts) if len(texts) == count else list(texts) * count


def _loss_type(key: str, value: Any, facts: Facts) -> Outcome:
    if facts.get(f"{SECTION}.bypass_mode") is not True:
        return skip("read with bypass_mode=true alone")
    if value == "reinforce":
        return many({"algorithm.policy_loss": "reinforce"})
    return skip("the clipped loss is algorithm.policy_loss=vanilla")


def _normalize(key: str, value: Any, facts: Facts) -> Outcome:
    is_on = value is True and facts.get(f"{SECTION}.rollout_is") is not None
    return many({f"{_OURS}.normalize": True}) if is_on else skip("off, or without weights")


def _rejection_threshold(key: str, value: Any, facts: Facts) -> Outcome:
    if value is None or facts.get(f"{SECTION}.rollout_rs") is None:
        return skip("not set" if value is None else "read with rollout_rs alone")
    return many({}, f"in {_OURS}.reject")


def _old_cap(value: Any, facts: Facts) -> Any:
    if not isinstance(value, int | float) or value <= 0:
        return skip("off there too")
    return many({f"{_OURS}.weights": "token", f"{_OURS}.upper": value})


def _read_range(value: Any) -> tuple[float | None, float]:
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


_BYPASS = WhenTrue(
    (("algorithm.old_log_probs", "rollout"),), "old log-probs are computed again, as by default"
)
ENTRIES = (
    *under(
        SECTION,
        Entry("rollout_is", To(f"{_OURS}.weights", if_set(_weights))),
        Entry("rollout_is_threshold", _threshold),
        Entry("rollout_is_threshold_lower", To(f"{_OURS}.lower", if_set(_lower))),
        Entry("rollout_is_batch_normalize", _normalize),
        Entry("rollout_rs", _reject),
        *same(_rejection_threshold, "rollout_rs_threshold rollout_rs_threshold_lower"),
        Entry(
            "rollout_token_veto_threshold",
            Unless((), f"a veto by the smallest ratio of a token is {_OURS}.reject.seq_max_k2", "not set"),
        ),
        *same(_BYPASS, "bypass_mode bypass_old_logprob_for_rollout"),
        Entry("loss_type", _loss_type),
        Entry("use_policy_gradient", WhenTrue((("algorithm.policy_loss", "reinforce"),), "off there too")),
        Entry("debug_rollout_actor_probs", NotNeeded("how far both differ is always measured")),
    ),
    Entry(f"{A}.tis_imp_ratio_cap", To(f"{_OURS}.weights", if_set(_old_cap))),
)
"""What becomes of the keys of the correction."""
