"""Names of loss reductions and KL estimators in the configuration."""

from __future__ import annotations

from typing import Literal, get_args

AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
KlKind = Literal[
    "k1",
    "kl",
    "abs",
    "k2",
    "mse",
    "k3",
    "low_var_kl",
    "k1+",
    "kl+",
    "abs+",
    "k2+",
    "mse+",
    "k3+",
    "low_var_kl+",
]
"""Names of the KL estimators (kl.py)."""
KL_KINDS: tuple[str, ...] = get_args(KlKind)
AGGREGATION_MODES: tuple[str, ...] = get_args(AggregationMode)
