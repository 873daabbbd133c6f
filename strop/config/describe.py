"""What each key means: read from the dataclasses, where it is written once."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any

from strop.config.save import to_dict
from strop.config.schema import FieldSpec, field_specs, is_section, join, section_default, type_name


@dataclass(frozen=True, kw_only=True)
class FieldDoc:
    """One key of a configuration, for help texts and the reference page."""

    key: str
    """The full key."""
    type: str
    """Its type in words."""
    default: Any
    """The plain default value; None where required."""
    required: bool
    """True where there is no default."""
    doc: str
    """The text under the field; "" where there is none."""


def describe(root: type) -> list[FieldDoc]:
    """Every key that takes a value, in the order of the fields; a section that may be absent is a key too."""
    return _describe(root, None, "")


def _describe(cls: type, base: Any, prefix: str) -> list[FieldDoc]:
    docs = []
    texts = field_texts(cls)
    for spec in field_specs(cls).values():
        key = join(prefix, spec.name)
        default = _default(spec, base)
        if spec.section is None or spec.can_be_none:
            docs.append(
                FieldDoc(
                    key=key,
                    type=type_name(spec.hint),
                    default=None if default is MISSING else _plain(default),
                    required=default is MISSING,
                    doc=texts.get(spec.name, ""),
                )
            )
        if spec.section is not None:
            docs.extend(_describe(spec.section, section_default(spec, base), key))
    return docs


def _default(spec: FieldSpec, base: Any) -> Any:
    if base is not None:
        return getattr(base, spec.name)
    return MISSING if spec.required else spec.default()


def _plain(value: Any) -> Any:
    if is_section(type(value)):
        return to_dict(value)
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


@cache
def field_texts(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass, also of inherited fields; of a section of a guest, its docstring."""
    texts = {
        spec.name: " ".join((inspect.getdoc(spec.section) or "").partition("\n\n")[0].split())
        for spec in field_specs(cls).values()
        if spec.section is not None
    }
    for owner in reversed(cls.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef), "the source of a class is a class definition"
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(inspect.cleandoc(text).split())
    return texts
