"""The error of a run folder that cannot be read, written or continued."""

from __future__ import annotations


class RunError(RuntimeError):
    """The run folder cannot be used as asked; the message says what to do."""
