"""The estimators that take what a critic or a process reward model says; importing this registers them."""

from strop.algorithms.advantages import gae, prime

__all__ = ["gae", "prime"]
