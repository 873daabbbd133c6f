"""Documentation of each key, read from the dataclasses, where it is written once."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from functools import cache
from typing import Any

from strop.config.save import to_flat_dict
from strop.config.schema import tree
from strop.utils.field_types import field_hints, is_section, type_name


@dataclass(frozen=True, kw_only=True)
class FieldDoc:
    """One key of a configuration, for help texts and the reference page."""

    key: str
    """The full key."""
    type: str
    """Its type in words, bounds included."""
    default: Any
    """The plain default value."""
    doc: str
    """The text under the field; "" where there is none."""


def describe(root: type) -> list[FieldDoc]:
    """Every key that takes a value, in the order of the fields."""
    return [
        FieldDoc(
            key=key,
            type=type_name(tree(root)[key].hint),
            default=default,
            doc=field_texts(tree(root)[key].owner).get(key.rpartition(".")[2], ""),
        )
        for key, default in to_flat_dict(root()).items()
    ]


@cache
def field_texts(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass, also of inherited fields; of a section without one, its docstring."""
    texts = {
        name: " ".join((inspect.getdoc(hint) or "").partition("\n\n")[0].split())
        for name, hint in field_hints(cls).items()
        if is_section(hint)
    }
    for owner in reversed(cls.__mro__[:-1]):
        for field, below in zip(body := class_body(owner), body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(inspect.cleandoc(text).split())
    return texts


def class_body(cls: type) -> list[ast.stmt]:
    """The statements of a class, from its source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef), "the source of a class is a class definition"
    return definition.body
