"""Everything there is to say about one key of a configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from strop.config.describe import FieldDoc, describe, field_texts
from strop.config.deviations import flat
from strop.config.layers import Layers
from strop.config.renamed import current_key
from strop.config.schema import field_specs, locate, type_name, union_members
from strop.config.sources import preset_layers, preset_names, preset_sections
from strop.config.usage import readers

_PAPER = re.compile(r"(?:([A-Z][\w-]+(?: et al\.)? \d{4}), )?(arXiv:\d{4}\.\d{4,5})")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a key means and where it matters."""

    key: str
    """The full key; of an entry of a free dict, the key of that dict."""
    type: str
    """Its type in words; `section` for a section."""
    default: Any
    """The plain default value; None for a section and where required."""
    required: bool
    """True where there is no default."""
    doc: str
    """The text under the field."""
    choices: tuple[str, ...]
    """The values it takes, where they are a closed list."""
    below: tuple[FieldDoc, ...]
    """The keys of a section; empty for a value."""
    presets: dict[str, Any]
    """Presets that set it, and to which value; of a section, its presets with all they set."""
    read_in: tuple[str, ...]
    """Modules that read it."""
    papers: tuple[str, ...]
    """Papers that the text under the field names."""


def explain(root: type, key: str) -> Explanation:
    """The explanation of a full key of the tree of `root`.

    Raises:
        ValueError: there is no such key; the message names the nearest one.
    """
    location = locate(root, current_key(key))
    owner = root
    for name in location.sections:
        section = field_specs(owner)[name].section
        assert section is not None, "a location's way leads through sections"
        owner = section
    spec = location.spec
    full = ".".join((*location.sections, spec.name))
    docs = {doc.key: doc for doc in describe(root)}
    known = docs.get(full)
    doc = field_texts(owner).get(spec.name, "")
    is_section = spec.section is not None
    return Explanation(
        key=full,
        type="section" if is_section else type_name(spec.hint),
        default=known.default if known else None,
        required=known.required if known else False,
        doc=doc,
        choices=_choices(spec.hint),
        below=tuple(one for one in docs.values() if one.key.startswith(f"{full}.")),
        presets=_presets(root, full, is_section=is_section),
        read_in=tuple(readers(owner, location.sections[-1] if location.sections else "", spec.name)),
        papers=papers_in(doc),
    )


def papers_in(text: str) -> tuple[str, ...]:
    """`Shao et al. 2024, arXiv:2402.03300` for every paper that a text names so; the number alone where it stands
    alone."""
    found = _PAPER.findall(" ".join(text.split()))
    return tuple(dict.fromkeys(", ".join(part for part in paper if part) for paper in found))


def _choices(hint: Any) -> tuple[str, ...]:
    found: list[str] = []
    for member in union_members(hint):
        if get_origin(member) is Literal:
            found += map(str, get_args(member))
        elif member is bool:
            found += ["true", "false"]
    return tuple(found)


def _presets(root: type, key: str, *, is_section: bool) -> dict[str, Any]:
    """Presets that set a key, or anything below a section."""
    found: dict[str, Any] = {}
    for section in preset_sections():
        for name in preset_names(section):
            layers = Layers(root)
            for layer in preset_layers(section, name):
                layers.add(layer)
            values = dict(flat(root, layers.values))
            if is_section:
                values = {one: value for one, value in values.items() if one.startswith(f"{key}.")}
                if values:
                    found[f"{section}={name}"] = values
            elif key in values:
                found[f"{section}={name}"] = values[key]
    return found
