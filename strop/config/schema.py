"""The tree of configuration dataclasses: its full keys, and where one leads."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from strop.config.unknown_key import KeyAliases, unknown_key
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
    raise ValueError(unknown_key(tree(root), key, section=section, aliases=aliases))


def current_key(key: str) -> str:
    """The full key, with the name that it has now; what is below a renamed key is renamed with it."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            logger.warning(f"{old} is called {new} since 0.2; it was taken as that")
            return new + key[len(old) :]
    return key
