"""The tree of configuration dataclasses: its full keys, and where one leads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from strop.config.nearest_key import nearest_key
from strop.utils.field_types import field_hints, is_mapping, is_section, type_name

logger = logging.getLogger(__name__)

RENAMED = {"reward.policies": "reward.on_failure"}
"""Full keys of 0.1, each with its name since 0.2, in the same section. An entry leaves with 0.3."""
REMOVED = {
    "trainer.clock": "wall",
    "trainer.clock_lengths": "",
    "trainer.clock_latencies": "",
    "rollout.overlap_log_probs": False,
}
"""Full keys that are gone, each with its default, which means nothing: the settings of earlier runs hold them. Another
value is refused as an unknown key. An entry leaves with 0.3."""

KeyAliases = Callable[[str, str, Collection[str]], tuple[Sequence[str], str]]
"""Lookup of keys of other libraries: from a key, the section of the command that it was given to, and all keys there
are, to the keys here that it stands for, and a sentence that says so. An unknown one has neither, and what is an option
of the command the sentence alone."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One full key of the tree."""

    key: str
    """The full key, with dots; "" for the root."""
    owner: type
    """The dataclass that has it as a field; of the root, the root itself."""
    hint: Any
    """The annotation of the field, resolved."""
    default: Any
    """The default where it stands in the tree, which may be another than that of the dataclass."""

    @property
    def is_section(self) -> bool:
        """It has keys of its own."""
        return is_section(self.hint)

    @property
    def is_free(self) -> bool:
        """It holds a dict whose keys are the user's."""
        return is_mapping(self.hint)


@cache
def tree(root: type) -> Mapping[str, Key]:
    """Every full key below the root, sections included, in the order of the fields."""
    return {key.key: key for key in _below(root(), "")}


def _below(config: object, prefix: str) -> Iterator[Key]:
    cls: type = type(config)
    for name, hint in field_hints(cls).items():
        key = Key(key=join(prefix, name), owner=cls, hint=hint, default=getattr(config, name))
        yield key
        if key.is_section:
            yield from _below(key.default, key.key)


def join(prefix: str, name: str) -> str:
    """The full key of a name below a prefix."""
    return f"{prefix}.{name}" if prefix else name


def flat(cls: type, values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Full key, value and annotation of each of nested values; a free dict is one value. The annotation of an unknown
    key is None, and that of a section whose value is no mapping is its dataclass. Removed keys at
    their default are left out.

    Args:
        cls: dataclass of the section that the values are for.
        values: nested, as read.
        prefix: full key of the section.

    Raises:
        ValueError: an old and a new name of the same key are both given.
    """
    for name, value in values.items():
        full = join(prefix, str(name))
        key = current_key(full)
        if key in REMOVED and value == REMOVED[key]:
            continue
        now = name if key == full else key.rpartition(".")[2]
        if now != name and now in values:
            raise ValueError(f"{full} and {key}, its name since 0.2, are both given: keep {key}")
        hint = field_hints(cls).get(now)
        if is_section(hint) and isinstance(value, Mapping | None):
            yield from flat(hint, value or {}, key)
        else:
            yield key, value, hint


def locate(
    root: type, key: str, section: str = "", aliases: KeyAliases | None = None
) -> tuple[Key, tuple[str, ...]]:
    """Field of a full key, and the rest of the key inside a free dict: empty for the field itself. `section` and
    `aliases` are as for `unknown_key`.

    Raises:
        ValueError: the tree has no such key; the message names the nearest one.
    """
    parts = key.split(".")
    for depth in range(len(parts), 0, -1):
        target, entry = tree(root).get(".".join(parts[:depth])), tuple(parts[depth:])
        if target is not None and (target.is_free or not entry):
            return target, entry
        if target is not None and not target.is_section:
            kind = type_name(target.hint)
            raise ValueError(f"unknown key {key}: {target.key} is a value ({kind}) without keys of its own")
    raise ValueError(unknown_key(root, key, section=section, aliases=aliases))


def unknown_key(
    root: type, key: str, origin: str = "", *, section: str = "", aliases: KeyAliases | None = None
) -> str:
    """The message for a key that the tree does not have.

    Args:
        root: at the top of the tree.
        key: that is not there.
        origin: where it was given.
        section: of the command that reads the settings, where it has one of its own: keys there are meant first.
        aliases: keys of other libraries.
    """
    keys = tree(root)
    of_this_name = [full for full in keys if full.rpartition(".")[2] == key.rpartition(".")[2]]
    above = key.rpartition(".")[0]
    ours, sentence = ((), "") if aliases is None else aliases(key, section, keys)
    is_of_above = bool(above) and any(full.startswith(f"{above}.") for full in ours)
    if section and not is_of_above:
        candidates = [full for full in of_this_name if full.startswith(f"{section}.")]
        if f"{section}.{key}" in candidates or len(candidates) == 1:
            suggestion = candidates[0] if len(candidates) == 1 else f"{section}.{key}"
            return f"unknown key {key}{origin}; the nearest valid key is {suggestion}"
    in_section = [full for full in of_this_name if above and full.startswith(f"{above}.")]
    is_plain = len(of_this_name) == 1 and (in_section or of_this_name[0] in ours)
    if sentence and set(ours) <= set(keys) and not is_plain:
        return f"unknown key {key}{origin}; {sentence}"
    near = nearest_key(key, keys)
    same = [full for full in of_this_name if full.endswith(f".{key}")] or of_this_name
    if len(same) > 1 and not (above and near is not None and near.startswith(f"{key.partition('.')[0]}.")):
        return f"unknown key {key}{origin}; the keys of this name are {', '.join(same)}"
    if near is not None:
        return f"unknown key {key}{origin}; the nearest valid key is {near}"
    owner, position = root, "the top level"
    for part in key.split(".")[:-1]:
        hint = field_hints(owner).get(part)
        if not is_section(hint):
            break
        owner, position = hint, part if owner is root else f"{position}.{part}"
    return f"unknown key {key}{origin}; {position} has the keys {', '.join(field_hints(owner))}"


def current_key(key: str) -> str:
    """The full key, with the name that it has now; what is below a renamed key is renamed with it."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            logger.warning(f"{old} is called {new} since 0.2; it was taken as that")
            return new + key[len(old) :]
    return key
