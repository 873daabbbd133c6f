"""Names of the KL estimators (kl.py), for configurations, which load no tensors."""

from __future__ import annotations

from typing import Literal, get_args

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

KL_KINDS: tuple[str, ...] = get_args(KlKind)
