"""Words of command lines that a person can copy."""

from __future__ import annotations

import shlex


def shell_word(word: object) -> str:
    """A path or value as a shell takes it: in quotes where it has spaces or other signs of the shell."""
    return shlex.quote(str(word))
