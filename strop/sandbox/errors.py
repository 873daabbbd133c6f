"""Errors of sandboxes. None of them says anything about a program, or about the answer that it came from."""

from __future__ import annotations


class SandboxUnavailable(RuntimeError, ValueError):
    """Programs cannot be isolated here; the message names the missing property and what to do."""


class SandboxFailed(RuntimeError):
    """A sandbox did not do its work; this says nothing about the program."""
