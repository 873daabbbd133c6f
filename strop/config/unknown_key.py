"""Answers to a key that a configuration does not have: the one that was most likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from functools import cached_property

from strop.utils.field_types import nearest

KeyAliases = Callable[[str, str, Collection[str]], tuple[Sequence[str], str]]
"""Lookup of keys of other libraries: from a key, the section of the command that it was given to, and all keys there
are, to the keys here that it stands for, and a sentence that says so. An unknown one has neither, and what is an option
of the command the sentence alone."""

_SAME_SECTION = 0.2
"""Bonus of a key in the same section, or of this very name below it: run.keep is run.keep_last sooner than
algorithm.keep, and critic.lr is critic.optim.lr."""


def unknown_key(
    keys: Collection[str],
    key: str,
    origin: str = "",
    *,
    section: str = "",
    aliases: KeyAliases | None = None,
) -> str:
    """The message for a key that is not there.

    Args:
        keys: all that are, sections included, in their order.
        key: that is not.
        origin: where it was given.
        section: of the command that reads the settings, where it has one of its own: keys there are meant first.
        aliases: keys of other libraries.
    """
    meant = _Meant(keys, key, section, aliases)
    said = (
        meant.of_this_command()
        or meant.of_another_library()
        or meant.of_this_name()
        or meant.nearest()
        or meant.in_this_section()
    )
    return f"unknown key {key}{origin}; {said}"


class _Meant:
    """Answers to what was meant by a key, each "" where it does not apply; `unknown_key` takes the first that does."""

    def __init__(
        self, keys: Collection[str], key: str, section: str, aliases: KeyAliases | None = None
    ) -> None:
        self._keys, self._key, self._section = keys, key, section
        self._above, _, name = key.rpartition(".")
        self._namesakes = [full for full in keys if full.rpartition(".")[2] == name]
        self._aliases, self._of_aliases = ((), "") if aliases is None else aliases(key, section, keys)

    def of_this_command(self) -> str:
        """A key of this name in the section of the command; not where the section that was written has an alias."""
        if not self._section or self._of(self._above, self._aliases):
            return ""
        candidates = self._of(self._section, self._namesakes)
        whole = f"{self._section}.{self._key}"
        chosen = candidates[0] if len(candidates) == 1 else whole if whole in candidates else ""
        return chosen and f"the nearest valid key is {chosen}"

    def of_another_library(self) -> str:
        """The sentence of the alias; not where a key here, the only one of this name, is plainly meant."""
        if not self._of_aliases or not set(self._aliases) <= set(self._keys):
            return ""
        is_plain = self._of(self._above, self._namesakes) or set(self._namesakes) <= set(self._aliases)
        return "" if len(self._namesakes) == 1 and is_plain else self._of_aliases

    def of_this_name(self) -> str:
        """Several keys of this name; not where one nearby was written wrong."""
        root = self._key.partition(".")[0]
        is_nearby = bool(self._above) and (self._nearest or "").startswith(f"{root}.")
        same = [full for full in self._namesakes if full.endswith(f".{self._key}")] or self._namesakes
        several = len(same) > 1 and not is_nearby
        return f"the keys of this name are {', '.join(same)}" if several else ""

    def nearest(self) -> str:
        """The key that is most alike."""
        return f"the nearest valid key is {self._nearest}" if self._nearest else ""

    def in_this_section(self) -> str:
        """The names in the section that was written, or in the nearest above it that there is."""
        above = self._above
        while above and not self._of(above, self._keys):
            above = above.rpartition(".")[0]
        names = [full.rpartition(".")[2] for full in self._keys if full.rpartition(".")[0] == above]
        return f"{above or 'the top level'} has the keys {', '.join(names)}"

    @cached_property
    def _nearest(self) -> str | None:
        return nearest(self._key, self._keys, _closeness)

    @staticmethod
    def _of(section: str, keys: Collection[str]) -> list[str]:
        """Keys among these below a section."""
        return [full for full in keys if section and full.startswith(f"{section}.")]


def _closeness(key: str, candidate: str) -> float:
    """Resemblance of two keys, from 0: they are not alike at all. Dots part sections, unlike those in a name."""
    section, _, name = key.lower().rpartition(".")
    other_section, _, other_name = candidate.lower().rpartition(".")
    whole = difflib.SequenceMatcher(None, key.lower(), candidate.lower()).ratio()
    last = difflib.SequenceMatcher(None, name, other_name).ratio()
    if key.startswith(f"{candidate}."):  # the section of the key itself
        return 0.0
    is_below = bool(section) and f"{other_section}.".startswith(f"{section}.")
    if is_below:  # then the section says nothing of the name
        is_part = set(other_name.split("_")) < set(name.split("_"))
        shorter, longer = sorted((name, other_name), key=len)
        is_swapped = sorted(name) == sorted(other_name)
        is_near = last >= 0.65 or is_part or is_swapped or (len(shorter) > 2 and longer.startswith(shorter))
    else:
        is_near = whole >= 0.7 or last >= 0.8
    bonus = _SAME_SECTION if is_below and (last == 1.0 or other_section == section) else 0.0
    return whole + last + bonus if is_near else 0.0
