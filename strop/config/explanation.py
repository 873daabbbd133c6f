"""Explanation of one key: type, default, text, presets and papers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from strop.config.docs import FieldDoc, describe, field_texts
from strop.config.layers import Layers
from strop.config.schema import Key, current_key, locate
from strop.config.sources import preset_layers, preset_names, preset_sections
from strop.config.unknown_key import KeyAliases
from strop.utils.field_types import literals, type_name, union_members

_PAPER = re.compile(r"(?:([A-Z][\w-]+(?: et al\.)? \d{4}), )?(arXiv:\d{4}\.\d{4,5})")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Meaning of a key and its presets, papers and neighbours."""

    key: str
    """The full key; of an entry of a free dict, the key of that dict."""
    type: str
    """Its type in words, bounds included; `section` for a section."""
    default: Any
    """The plain default value; None for a section."""
    doc: str
    """The text under the field."""
    choices: tuple[str, ...]
    """The values it takes, where they are a closed list."""
    below: tuple[FieldDoc, ...]
    """The keys of a section; empty for a value."""
    presets: dict[str, Any]
    """Presets that set it, and to which value; of a section, its presets with all they set."""
    defined_in: str
    """The class that has the field, dotted."""
    papers: tuple[str, ...]
    """Papers that the text under the field names."""


def explain(root: type, key: str, *, aliases: KeyAliases | None = None) -> Explanation:
    """The explanation of a full key of the tree of `root`.

    Args:
        root: the dataclass at the top.
        key: full key.
        aliases: keys of other libraries, for the message about an unknown key.

    Raises:
        ValueError: there is no such key; the message names the nearest one.
    """
    field_key = locate(root, current_key(key), aliases=aliases)[0]
    docs = {doc.key: doc for doc in describe(root)}
    doc = field_texts(field_key.owner).get(field_key.key.rpartition(".")[2], "")
    return Explanation(
        key=field_key.key,
        type=type_name(field_key.hint),
        default=None if field_key.is_section else docs[field_key.key].default,
        doc=doc,
        choices=_choices(field_key.hint),
        below=tuple(entry for entry in docs.values() if entry.key.startswith(f"{field_key.key}.")),
        presets=_presets(root, field_key),
        defined_in=f"{field_key.owner.__module__}.{field_key.owner.__qualname__}",
        papers=papers_in(doc),
    )


def papers_in(text: str) -> tuple[str, ...]:
    """`Shao et al. 2024, arXiv:2402.03300` for every paper that a text names so; the number alone where it stands
    alone."""
    citations = _PAPER.findall(" ".join(text.split()))
    return tuple(dict.fromkeys(", ".join(part for part in paper if part) for paper in citations))


def _choices(hint: object) -> tuple[str, ...]:
    words = tuple(map(str, literals(hint)))
    return (*words, "true", "false") if bool in union_members(hint) else words


def _presets(root: type, target: Key) -> dict[str, Any]:
    """Presets that set a key, or anything below a section."""
    setting_presets: dict[str, Any] = {}
    for section in preset_sections():
        for name in preset_names(section):
            values = Layers(root, preset_layers(section, name)).values
            below = {key: value for key, value in values.items() if key.startswith(f"{target.key}.")}
            if below or target.key in values:
                setting_presets[f"{section}={name}"] = values.get(target.key, below)
    return setting_presets
