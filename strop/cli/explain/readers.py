"""Which modules read a setting: found in their source, by the names that stand before the dot."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from strop.config.docs import class_body

PACKAGE = Path(__file__).parent.parent


def readers(owner: type, section: str, name: str, package: Path = PACKAGE) -> list[str]:
    """Modules that read the field `name` of a configuration dataclass, dotted, in alphabetical order.

    Counted is `x.name` where x, or its last part, is called as the section, is annotated with the dataclass, is what
    `section_of` finds by it, or was assigned from one of these; and the same for a property of the dataclass that is
    made of the field. A field of settings that stand in a class of their own is also read through that class. A reader
    that gets the value by other ways (getattr, a mapping) is not seen, so the list may be too short. The module of
    the dataclass itself, which checks the value, is left out.

    Args:
        owner: the dataclass.
        section: last part of the section's key; "" for the root.
        name: of the field.
        package: folder of the modules.
    """
    declaring = next(
        (base for base in reversed(owner.__mro__) if name in vars(base).get("__annotations__", {})), owner
    )
    wanted = {name, *_properties_of(declaring, name)}
    homes = {Path(inspect.getfile(one)).resolve() for one in (owner, declaring)}
    class_names = {owner.__name__, declaring.__name__}
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.resolve() in homes or not any(f".{word}" in text for word in wanted):
            continue
        tree = ast.parse(text)
        receivers = _receivers(tree, class_names, section)
        if any(_holds(node.value, receivers, class_names) for node in _attributes(tree, wanted)):
            parts = path.relative_to(package.parent).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def _attributes(tree: ast.AST, names: set[str]) -> Iterator[ast.Attribute]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in names)


def _identifier(node: ast.expr) -> str:
    """The last name of `a` or `a.b._c`, without leading underscores; "" for anything else."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lstrip("_")
    return ""


def _holds(node: ast.expr, receivers: set[str], class_names: set[str]) -> bool:
    """The section, by a name of these."""
    return _identifier(node) in receivers


def _receivers(tree: ast.Module, class_names: set[str], section: str) -> set[str]:
    """Names that hold the section in a module: annotated with its class, or assigned from what holds it."""
    found = {section or "config"}
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.expr() as annotation):
                if any(one in ast.unparse(annotation) for one in class_names):
                    found.add(name)
            case ast.AnnAssign(target=target, annotation=annotation):
                if any(one in ast.unparse(annotation) for one in class_names):
                    found.add(_identifier(target))
    for node in sorted(
        (one for one in ast.walk(tree) if isinstance(one, ast.Assign)), key=lambda one: one.lineno
    ):
        if _holds(node.value, found, class_names):
            found.add(_identifier(node.targets[0]))
    return found


def _properties_of(owner: type, name: str) -> Iterator[str]:
    """Properties of the dataclass that read the field."""
    for node in class_body(owner):
        is_property = isinstance(node, ast.FunctionDef) and any(
            isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list
        )
        if is_property and any(_identifier(part.value) == "self" for part in _attributes(node, {name})):
            assert isinstance(node, ast.FunctionDef), "checked above"
            yield node.name
