"""Which modules read a setting: found in their source, by the names that stand before the dot."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from strop.explaining.describe import class_body

PACKAGE = Path(__file__).parent.parent


def readers(owner: type, section: str, name: str, package: Path = PACKAGE) -> list[str]:
    """Modules that read the field `name` of a configuration dataclass, dotted, in alphabetical order.

    Counted is `x.name` where x, or its last part, is called as the section, is annotated with the dataclass, or was
    assigned from the section; and the same for a property of the dataclass that is made of the field. A reader
    that gets the value by other ways (getattr, a mapping) is not seen, so the list may be too short. The module of
    the dataclass itself, which checks the value, is left out.

    Args:
        owner: the dataclass.
        section: last part of the section's key; "" for the root.
        name: of the field.
        package: folder of the modules.
    """
    wanted = {name, *_properties_of(owner, name)}
    home = Path(inspect.getfile(owner)).resolve()
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.resolve() == home or not any(f".{word}" in text for word in wanted):
            continue
        tree = ast.parse(text)
        receivers = _receivers(tree, owner.__name__, section)
        if any(_identifier(node.value) in receivers for node in _attributes(tree, wanted)):
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


def _receivers(tree: ast.Module, class_name: str, section: str) -> set[str]:
    """Names that hold the section in a module: annotated with its class, or assigned from such a name or from it."""
    found = {section or "config"}
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.expr() as annotation):
                if class_name in ast.unparse(annotation):
                    found.add(name)
            case ast.AnnAssign(target=target, annotation=annotation):
                if class_name in ast.unparse(annotation):
                    found.add(_identifier(target))
    return found | {
        _identifier(node.targets[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _identifier(node.value) in found
    }


def _properties_of(owner: type, name: str) -> Iterator[str]:
    """Properties of the dataclass that read the field."""
    for node in class_body(owner):
        is_property = isinstance(node, ast.FunctionDef) and any(
            isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list
        )
        if is_property and any(_identifier(part.value) == "self" for part in _attributes(node, {name})):
            assert isinstance(node, ast.FunctionDef), "checked above"
            yield node.name
