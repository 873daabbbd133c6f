"""Values from several places, laid over each other, with a note of where each came from.

Sections merge key by key. Everything else, also a free dict such as reward.kwargs, is one value that a later
layer replaces; only an override below its key (`reward.kwargs.strict=true`) changes one entry of it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any

from strop.config.overrides import Override
from strop.config.schema import FieldSpec, Location, default_at, field_specs, join, locate, unknown_key
from strop.config.sources import Layer, preset_names


class Layers:
    """The values given so far for the tree of `root`. Problems are collected in `problems`, not raised."""

    def __init__(self, root: type) -> None:
        self.root = root
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []
        self._origins: dict[str, str] = {}
        self._presets: set[str] = set()

    def origin(self, key: str) -> str:
        """` (in my.yaml)` for a key that a file or preset gave, or for what is below it; else ""."""
        key = key.partition("[")[0]
        while key and key not in self._origins:
            key = key.rpartition(".")[0]
        return _where(self._origins.get(key, ""))

    def source_of(self, key: str) -> str:
        """Where the value of a full key comes from: default, preset NAME, file PATH, command line; several of them for
        a free dict that was put together."""
        above = key
        while above and above not in self._origins:
            above = above.rpartition(".")[0]
        places = [self._origins[above]] if above else []
        places += [origin for known, origin in self._origins.items() if known.startswith(f"{key}.")]
        names = [_place(origin, is_preset=origin in self._presets) for origin in places]
        return ", ".join(dict.fromkeys(names)) or "default"

    def add(self, layer: Layer) -> None:
        """Lay a file's or preset's values over what is there."""
        if layer.preset:
            self._presets.add(layer.origin)
        if not layer.section:
            self._merge(self.root, self.values, layer.values, "", layer.origin)
        elif self.is_section(layer.section):
            self._set(layer.section, layer.values, layer.origin)
        else:
            self.problems.append(unknown_key(self.root, layer.section, _where(layer.origin)))

    def replace_section(self, key: str, layers: Sequence[Layer]) -> None:
        """Forget what is there for a section and lay a preset's values over its defaults; what the preset says of other
        sections comes on top of what is there."""
        self._reset(key)
        for layer in layers:
            self.add(layer)

    def apply(self, override: Override) -> None:
        """Apply one override of the command line."""
        try:
            if override.kind == "reset":
                self._reset(override.key)
            elif override.kind == "add" and not locate(self.root, override.key).entry:
                raise ValueError(
                    f"{override.text}: + adds an entry to a free dict, and {override.key} is not inside one; "
                    f"write it without +"
                )
            else:
                self._set(override.key, override.value, "")
        except ValueError as error:
            self.problems.append(str(error))

    def is_section(self, key: str) -> bool:
        """True where a full key leads to a section."""
        try:
            location = locate(self.root, key)
        except ValueError:
            return False
        return location.spec.section is not None and not location.entry

    def _merge(
        self, cls: type, target: dict[str, Any], values: dict[Any, Any], prefix: str, origin: str
    ) -> None:
        for name, value in values.items():
            key = join(prefix, str(name))
            spec = field_specs(cls).get(name) if isinstance(name, str) else None
            if spec is not None:
                self._put(spec, target, value, key, origin)
                continue
            if isinstance(value, dict) and len(value) == 1:  # a misspelt section: the key in it tells more
                key = join(key, str(next(iter(value))))
            self.problems.append(unknown_key(self.root, key, _where(origin)))

    def _put(self, spec: FieldSpec, target: dict[str, Any], value: Any, key: str, origin: str) -> None:
        """Lay one value over target[spec.name]; `key` is its full key."""
        is_null = value is None and spec.can_be_none
        if spec.section is not None and isinstance(value, dict | None) and not is_null:
            if not isinstance(target.get(spec.name), dict):
                target[spec.name] = {}
            self._merge(spec.section, target[spec.name], value or {}, key, origin)
        elif spec.section is not None and not is_null:
            self.problems.append(_value_for_section(spec.section, key, value, origin))
        elif not spec.is_free and _holds_interpolation(value):
            self.problems.append(
                f"{key} is {value!r}{_where(origin)}, but ${{...}} is not resolved: write the value itself"
            )
        else:
            self._forget(key)
            target[spec.name] = value
            self._origins[key] = origin

    def _set(self, key: str, value: Any, origin: str) -> None:
        """Lay a value over a full key, which may lead into a free dict."""
        location = locate(self.root, key)
        target = self.values
        for name in location.sections:
            if not isinstance(target.get(name), dict):
                target[name] = {}
            target = target[name]
        if not location.entry:
            self._put(location.spec, target, value, key, origin)
            return
        entries = self._free_dict(location, target)
        for name in location.entry[:-1]:
            entries = entries.setdefault(name, {})
            if not isinstance(entries, dict):
                raise ValueError(f"{key} cannot be set: {name} in it is {entries!r} and has no entries")
        entries[location.entry[-1]] = value
        self._forget(key)
        self._origins[key] = origin

    def _reset(self, key: str) -> None:
        """Go back to the default of a full key, or take one entry out of a free dict."""
        location = locate(self.root, key)
        target: Any = self.values
        for name in location.sections:
            target = target.get(name)
            if not isinstance(target, dict):
                target = {}
        if not location.entry:
            target.pop(location.spec.name, None)
            self._forget(key)
            return
        entries: Any = self._free_dict(location, target)
        for name in location.entry[:-1]:
            entries = entries.get(name) if isinstance(entries, dict) else None
        if not isinstance(entries, dict) or location.entry[-1] not in entries:
            raise ValueError(f"~{key} has nothing to remove: there is no such entry")
        del entries[location.entry[-1]]
        self._forget(key)

    def _forget(self, key: str) -> None:
        """Forget where a full key and what is below it came from."""
        for known in [name for name in self._origins if name == key or name.startswith(f"{key}.")]:
            del self._origins[known]

    def _free_dict(self, location: Location, target: dict[str, Any]) -> dict[str, Any]:
        """The free dict a location leads into; a copy of its default where nothing was given yet."""
        name = location.spec.name
        if target.get(name) is None:
            default = default_at(self.root, location)
            use_default = name not in target and default is not MISSING and default is not None
            target[name] = copy.deepcopy(dict(default)) if use_default else {}
        found: dict[str, Any] = target[name]
        if not isinstance(found, dict):
            raise ValueError(
                f"{join('.'.join(location.sections), name)} is {found!r}, not a mapping of entries"
            )
        return found


def _where(origin: str) -> str:
    return f" (in {origin})" if origin else ""


def _place(origin: str, *, is_preset: bool) -> str:
    if not origin:
        return "command line"
    return origin if is_preset else f"file {origin}"


def _value_for_section(section: type, key: str, value: Any, origin: str) -> str:
    names = ", ".join(field_specs(section))
    text = f"{key} is {value!r}{_where(origin)}, but it is a section with the keys {names}"
    if isinstance(value, str) and value in preset_names(key):
        text += f"; for the preset of that name, list `- {key}: {value}` under defaults"
    return text


def _holds_interpolation(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_holds_interpolation, value))
    return isinstance(value, str) and "${" in value
