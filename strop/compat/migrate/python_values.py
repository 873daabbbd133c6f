"""Values and functions of a parsed Python script that can be had without running it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_FOREIGN = ("trl", "peft", "accelerate", "vllm", "unsloth", "open_r1")
"""Packages that a file of reward functions is not to need."""
_NUMBERS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST = 1 << 53


def literal(node: ast.expr, follow: Callable[[ast.expr], ast.expr], variables: Mapping[str, str]) -> Any:
    """The value of an expression of literals, sums and products of them, and environment variables.

    Args:
        node: the expression.
        follow: gives what a name stands for.
        variables: values of environment variables; others have the default that is asked for with them.

    Raises:
        ValueError: it has none that is known.
    """

    def value(node: ast.expr) -> Any:
        match follow(node):
            case ast.Constant(value=known):
                return known
            case ast.List(elts=parts):
                return [value(part) for part in parts]
            case ast.Tuple(elts=parts):
                return tuple(value(part) for part in parts)
            case ast.Dict(keys=keys, values=values) if None not in keys:
                return {value(k): value(v) for k, v in zip(keys, values, strict=True) if k is not None}
            case ast.UnaryOp(op=ast.USub(), operand=part):
                return -_number(value(part))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _NUMBERS:
                return _combined(type(op), value(left), value(right))
            case ast.JoinedStr(values=parts):
                return "".join(str(value(part)) for part in parts)
            case ast.FormattedValue(value=part, format_spec=None, conversion=-1):
                return value(part)
            case ast.Attribute(
                value=ast.Name(id="torch"), attr=("bfloat16" | "float16" | "float32") as dtype
            ):
                return dtype
            case ast.Call() | ast.Subscript() as lookup:
                return _from_environment(lookup, value, variables)
        raise ValueError("its value is not known")

    return value(node)


def _number(value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("no number")
    return value


def _combined(kind: type[ast.operator], left: object, right: object) -> Any:
    if kind is ast.Add and isinstance(left, str) and isinstance(right, str):
        return left + right
    try:
        result = _NUMBERS[kind](_number(left), _number(right))
    except ZeroDivisionError as error:
        raise ValueError("a division by zero") from error
    if abs(result) > _LARGEST:
        raise ValueError("too large")
    return result


def _from_environment(
    node: ast.Call | ast.Subscript, value: Callable[[ast.expr], Any], variables: Mapping[str, str]
) -> Any:
    """os.environ["NAME"], os.environ.get("NAME", default) or os.getenv("NAME", default); int(...) and float(...)."""
    if isinstance(node, ast.Subscript):
        if ast.unparse(node.value) in ("os.environ", "environ") and value(node.slice) in variables:
            return variables[value(node.slice)]
        raise ValueError("its value is not known")
    function = ast.unparse(node.func)
    arguments = node.args
    if function in ("int", "float", "str") and len(arguments) == 1 and not node.keywords:
        return {"int": int, "float": float, "str": str}[function](value(arguments[0]))
    if function not in ("os.environ.get", "environ.get", "os.getenv", "getenv") or not arguments:
        raise ValueError("its value is not known")
    name = value(arguments[0])
    if name in variables:
        return variables[name]
    if len(arguments) < 2:
        raise ValueError("its value is not known")
    return value(arguments[1])


def copied_functions(tree: ast.Module, text: str, names: Sequence[str]) -> str:
    """The text of a module with these functions of a script and what they need of it; empty where that cannot be told.

    Needed are functions, classes, imports and assignments at the top of the script whose names they use.

    Args:
        tree, text: the script, parsed and as it is written.
        names: of the functions.
    """
    makers: dict[str, ast.stmt] = {}
    for node in tree.body:
        for name in _assigned_names(node):
            makers[name] = node
    chosen: dict[int, ast.stmt] = {}
    waiting = list(names)
    while waiting:
        maker = makers.get(waiting.pop())
        if maker is None or id(maker) in chosen:
            continue
        if isinstance(maker, ast.Import | ast.ImportFrom) and _packages(maker) & set(_FOREIGN):
            return ""
        chosen[id(maker)] = maker
        waiting += [part.id for part in ast.walk(maker) if isinstance(part, ast.Name)]
    nodes = [node for node in tree.body if id(node) in chosen]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    rest = [node for node in nodes if node not in imports]
    lines = text.splitlines()
    parts = [_text(imports, lines, "\n"), _text(rest, lines, "\n\n\n")]
    return "\n\n\n".join(part for part in parts if part) + "\n"


def _text(nodes: Sequence[ast.stmt], lines: Sequence[str], between: str) -> str:
    """Statements as they are written, decorators included."""
    return between.join(
        "\n".join(
            lines[
                min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
                - 1 : node.end_lineno
            ]
        )
        for node in nodes
    )


def _assigned_names(node: ast.stmt) -> list[str]:
    """Names that a statement gives something to."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [(alias.asname or alias.name).partition(".")[0] for alias in names]
        case ast.Assign(targets=targets):
            return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _packages(node: ast.Import | ast.ImportFrom) -> set[str]:
    modules = (
        [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    )
    return {module.partition(".")[0] for module in modules}
