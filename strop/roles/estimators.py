"""The estimators that take what a critic or a process reward model says; importing this registers them."""

from strop.roles import gae, prime

__all__ = ["gae", "prime"]
