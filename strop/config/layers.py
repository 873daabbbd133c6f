"""Values from several places, laid over each other, with a note of where each came from.

Sections merge key by key. Everything else, also a free dict such as reward.kwargs, is one value that a later
layer replaces; only an override below its key (`reward.kwargs.strict=true`) changes one entry of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from strop.config.interpolation import Interpolation
from strop.config.overrides import Override
from strop.config.places import place_of
from strop.config.schema import Key, flat, join, locate, tree
from strop.config.sources import Layer, preset_names
from strop.config.unknown_key import KeyAliases, unknown_key
from strop.config.wrong_values import Written
from strop.utils.field_types import field_hints, is_section
from strop.utils.sanitize import remember_secrets_in
from strop.utils.setting_text import setting_text


class Layers:
    """Values given so far for the tree of `root`, by full keys. Problems are collected in `problems`, not raised."""

    def __init__(
        self,
        root: type,
        layers: Sequence[Layer] = (),
        *,
        section: str = "",
        in_shell: bool = True,
        aliases: KeyAliases | None = None,
    ) -> None:
        self.root, self._section, self._in_shell, self._aliases = root, section, in_shell, aliases
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []
        self.presets: dict[str, str] = {}
        """The presets of sections that were laid: full key of the section to the preset's name."""
        self._origins: dict[str, str] = {}
        self._files: dict[str, Layer] = {}
        """The layer of each key that a file gave."""
        self._typed: dict[str, str] = {}
        """The value of each key that an override gave, as it was typed."""
        self._of_presets: set[str] = set()
        for layer in layers:
            self.add(layer)

    def origin(self, key: str) -> str:
        """` (in my.yaml, line 3)` for a key that a file or preset gave, or for what is below it; else ""."""
        above = self._given_at(key.partition("[")[0])
        layer = self._files.get(above)
        return _where(self._origins.get(above, "")) if layer is None else _where_in(layer, key)

    def written(self, key: str) -> Written | None:
        """The value of a full key as it was typed, where it is a plain one."""
        above = self._given_at(key.partition("[")[0])
        if (layer := self._files.get(above)) is not None:
            place = place_of(layer.text, _below(key, layer.section))
            return Written(text=place[1], in_shell=False) if place is not None and place[1] else None
        typed = self._typed.get(above)
        if typed is None or key == above:
            return None if typed is None else Written(text=typed, in_shell=self._in_shell)
        place = place_of(f"typed: {typed}", f"typed{key[len(above) :]}")
        return Written(text=place[1], in_shell=self._in_shell) if place is not None and place[1] else None

    def source_of(self, key: str) -> str:
        """Origin of the value of a full key: default, preset NAME, file PATH, command line; several of them for
        a free dict that was put together."""
        above = self._given_at(key)
        places = [self._origins[above]] if above else []
        places += [origin for origin_key, origin in self._origins.items() if origin_key.startswith(f"{key}.")]
        names = [
            "command line"
            if not origin_name
            else origin_name
            if origin_name in self._of_presets
            else f"file {origin_name}"
            for origin_name in places
        ]
        return ", ".join(dict.fromkeys(names)) or "default"

    def _given_at(self, key: str) -> str:
        """The key itself, or the nearest above it, that was given; "" for none."""
        while key and key not in self._origins:
            key = key.rpartition(".")[0]
        return key

    def add(self, layer: Layer) -> None:
        """Lay a file's or preset's values over what is there."""
        remember_secrets_in(layer.values, layer.section)  # no sentence about them repeats one
        if layer.preset:
            self._of_presets.add(layer.origin)
        if layer.section and layer.preset:
            self.presets[layer.section] = layer.preset
        if not layer.section or self.is_section(layer.section):
            cls = tree(self.root)[layer.section].hint if layer.section else self.root
            try:
                self._lay(cls, layer.values, layer.section, layer)
            except ValueError as error:
                self.problems.append(f"{layer.origin}: {error}")
        else:
            self.problems.append(self._unknown(layer.section, _where(layer.origin)))

    def replace_section(self, key: str, layers: Sequence[Layer]) -> None:
        """Forget what is there for a section and lay a preset's values over its defaults; what the preset says of other
        sections comes on top of what is there."""
        self._forget(key)
        for layer in layers:
            self.add(layer)

    def apply(self, override: Override) -> None:
        """Apply one override of the command line."""
        remember_secrets_in(override.value, override.key)
        try:
            target, entry = locate(self.root, override.key, self._section, self._aliases)
            if entry:
                self._change_entry(target, entry, override)
            elif override.kind == "reset":
                self._forget(override.key)
            else:
                section, _, name = override.key.rpartition(".")
                self._lay(target.owner, {name: override.value}, section, None)
                self._typed[override.key] = override.text.partition("=")[2].strip()
        except ValueError as error:
            self.problems.append(str(error))

    def refuse_interpolations(self) -> None:
        """Of a text that may be somebody else's, `${...}` is not resolved; in a free dict it is meant as text."""
        for key, value in self._interpolated():
            self.problems.append(
                f"{key} is {value!r}{self.origin(key)}, but ${{...}} is not resolved in the settings of a run folder: "
                f"write the value itself"
            )

    def resolve(self) -> None:
        """Put values in the place of `${...}`, and find keys that a file leaves open with `???`."""
        for key, value in list(self._interpolated()):
            try:
                self.values[key] = Interpolation(self.root, self.values, self._aliases).value(value, key)
            except ValueError as error:
                self.problems.append(f"{key} is {value!r}{self.origin(key)}: {error}")
        for key, value in self.values.items():
            if value == "???":
                self.problems.append(
                    f"{key} is ???{self.origin(key)}, so whoever uses the file must give it: {key}=VALUE"
                )

    def _interpolated(self) -> Iterator[tuple[str, Any]]:
        for key, value in self.values.items():
            texts = [] if tree(self.root)[key].is_free else value if isinstance(value, list) else [value]
            if any(isinstance(text, str) and "${" in text for text in texts):
                yield key, value

    def has(self, key: str) -> bool:
        """True where a full key is one of the tree."""
        return key in tree(self.root)

    def is_section(self, key: str) -> bool:
        """True where a full key leads to a section."""
        return key in tree(self.root) and tree(self.root)[key].is_section

    def _lay(self, cls: type, values: dict[Any, Any], prefix: str, layer: Layer | None) -> None:
        """Lay the values of a section over what is there; without a layer, those of an override."""
        origin = "" if layer is None else layer.origin
        for key, value, hint in flat(cls, values, prefix):
            if hint is None:
                is_misspelt_section = isinstance(value, dict) and len(value) == 1  # the key in it tells more
                full = join(key, str(next(iter(value)))) if is_misspelt_section else key
                where = _where_in(layer, full)
                is_dotted = key in tree(self.root)  # every section of it is there, so only the dots are wrong
                self.problems.append(_dotted(key, where) if is_dotted else self._unknown(full, where))
            elif is_section(hint):
                self.problems.append(_value_for_section(hint, key, value, _where_in(layer, key)))
            else:
                self._forget(key)
                self.values[key] = value
                self._origins[key] = origin
                if layer is not None and layer.text:
                    self._files[key] = layer

    def _unknown(self, key: str, origin: str) -> str:
        return unknown_key(tree(self.root), key, origin, section=self._section, aliases=self._aliases)

    def _forget(self, key: str) -> None:
        """Go back to the default of a full key, with all that is below it."""
        below = f"{key}."
        known = tree(self.root).get(key)
        is_leaf = known is not None and not known.is_section and not known.is_free
        table: dict[str, Any]
        for table in (self.values, self._origins, self._files, self._typed):
            if is_leaf:
                table.pop(key, None)
                continue
            for name_of_entry in [name for name in table if name == key or name.startswith(below)]:
                del table[name_of_entry]

    def _change_entry(self, target: Key, entry: tuple[str, ...], override: Override) -> None:
        """Set one entry of a free dict, or take it out."""
        whole = copy.deepcopy(self.values.get(target.key, target.default))
        entries = whole
        for name in entry[:-1]:
            if isinstance(entries, dict):
                entries = entries.setdefault(name, {})
        if not isinstance(entries, dict):
            above = override.key.rpartition(".")[0]
            raise ValueError(
                f"{override.key} cannot be set: {above} is {entries!r}, not a mapping of entries"
            )
        if override.kind != "reset":
            entries[entry[-1]] = override.value
        elif entry[-1] in entries:
            del entries[entry[-1]]
        else:
            raise ValueError(f"~{override.key} has nothing to remove: there is no such entry")
        self.values[target.key] = whole
        for origin_key in [name for name in self._origins if f"{name}.".startswith(f"{override.key}.")]:
            del self._origins[origin_key]
        if override.kind != "reset":
            self._origins[override.key] = ""
            self._typed[override.key] = override.text.partition("=")[2].strip()


def _dotted(key: str, where: str) -> str:
    """The message for a key of a file that has dots in its name."""
    *sections, name = key.split(".")
    nested = f"{name}: ..."
    for section in reversed(sections):
        nested = f"{section}: {{{nested}}}"
    return f"the key {key}{where} has dots, as on the command line: in a file write {nested}"


def _where(origin: str) -> str:
    return f" (in {origin})" if origin else ""


def _where_in(layer: Layer | None, key: str) -> str:
    """` (in my.yaml, line 3)` of a full key in a layer."""
    if layer is None:
        return ""
    place = place_of(layer.text, _below(key, layer.section)) if layer.text else None
    return _where(layer.origin if place is None else f"{layer.origin}, line {place[0]}")


def _below(key: str, section: str) -> str:
    return key.removeprefix(f"{section}.") if section else key


def _value_for_section(section: type, key: str, value: object, where: str) -> str:
    names = ", ".join(field_hints(section))
    text = f"{key} is {setting_text(value, quotes=True)}{where}, but it is a section with the keys {names}"
    if isinstance(value, str) and value in preset_names(key):
        text += f"; for the preset of that name, list `- {key}: {value}` under defaults"
    return text
