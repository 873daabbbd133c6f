"""Names in a parsed Python script, and what they stand for; nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, TypeGuard

from strop.compat.migrate.python_values import literal
from strop.compat.migrate.trl_loop import KINDS

CONFIGS = tuple(f"{kind}Config" for kind in KINDS)
"""Configurations of TRL, whose keyword arguments a script may ask for again as `args.name`."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LONGEST_CHAIN = 50
"""Steps that are followed from a value back to where it is made."""


class ScriptNames:
    """The names of a script that have one value, or of several, one after the other, the last one above."""

    def __init__(self, tree: ast.Module, variables: Mapping[str, str]) -> None:
        """Args:
        tree: the script.
        variables: values of environment variables that it asks for.
        """
        self.functions = {node.name: node for node in tree.body if isinstance(node, FUNCTIONS)}
        self.imported: dict[str, tuple[str, str]] = {}
        """Module and name there, by the name here."""
        self._variables = variables
        self._arguments: dict[str, ast.expr] = {}
        """Arguments of the function whose call is followed, by parameter."""
        self._assigned: dict[str, list[ast.expr]] = {}
        bodies: list[ast.Module | ast.If | ast.FunctionDef | ast.AsyncFunctionDef] = [
            tree,
            *filter(is_main, tree.body),
            *(node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)),
        ]
        self.bodies = {id(statement): id(node) for node in bodies for statement in node.body}
        """For each statement that no condition or loop governs, the module or function it stands in."""
        certain: dict[str, list[tuple[int, ast.expr]]] = {}
        scopes: dict[str, set[int | None]] = {}
        for node in ast.walk(tree):
            self._note(node)
            if isinstance(node, ast.Assign) and (name := _assigned_name(node)):
                scopes.setdefault(name, set()).add(self.bodies.get(id(node)))
                certain.setdefault(name, []).append((node.end_lineno or node.lineno, node.value))
        self._certain = {
            name: values
            for name, values in certain.items()
            if len(scopes[name]) == 1 and None not in scopes[name]
        }
        """Names that are assigned several times, but only by such statements of one body, with their last lines."""

    def _note(self, node: ast.AST) -> None:
        match node:
            # model, tokenizer = ....from_pretrained(...)
            case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=name), *_])], value=ast.Call() as value):
                self._assigned.setdefault(name, []).append(value)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assigned.setdefault(name, []).append(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._assigned.setdefault(name, []).append(value)
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    self.imported[alias.asname or alias.name] = (module, alias.name)

    def resolved(self, node: ast.expr) -> ast.expr:
        """The value of a name; any other expression stays as it is."""
        for _ in range(5):
            if isinstance(node, ast.Name) and node.id in self._arguments:
                node = self._arguments[node.id]
                continue
            if isinstance(node, ast.Attribute) and (value := self._of_config(node)) is not None:
                node = value
                continue
            if not isinstance(node, ast.Name):
                break
            values = self._assigned.get(node.id, [])
            if len(values) > 1:
                above = [value for line, value in self._certain.get(node.id, ()) if line < node.lineno]
                values = above[-1:]
            if len(values) != 1:
                break
            node = values[0]
        return node

    def _of_config(self, node: ast.Attribute) -> ast.expr | None:
        """Value of `args.name`, where args is a configuration that the script makes."""
        call = self.resolved(node.value) if isinstance(node.value, ast.Name) else node.value
        if not isinstance(call, ast.Call) or last_name(call.func) not in CONFIGS:
            return None
        return next((keyword.value for keyword in call.keywords if keyword.arg == node.attr), None)

    def literal(self, node: ast.expr) -> Any:
        """The value of an expression of literals, names that stand for them, and environment variables with a default.

        Raises:
            ValueError: it has none that is known.
        """
        return literal(node, self.resolved, self._variables)

    def text(self, node: ast.expr) -> str | None:
        """The same of a text; None for others."""
        try:
            value = self.literal(node)
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def returned(self, name: str, call: ast.Call) -> ast.expr | None:
        """Value that a function of the script returns, where it has one `return`; its parameters have the arguments of
        the call until `end_call`."""
        function = self.functions[name]
        returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
        names = [parameter.arg for parameter in function.args.args]
        defaults = function.args.defaults
        if len(returns) != 1 or returns[0].value is None or len(call.args) > len(names):
            return None
        self._arguments |= dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        self._arguments |= dict(zip(names, call.args, strict=False))
        self._arguments |= {
            keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None
        }
        return returns[0].value

    def end_call(self) -> None:
        """Forget the arguments of functions whose calls were followed."""
        self._arguments = {}


def is_main(node: ast.AST) -> TypeGuard[ast.If]:
    """`if __name__ == "__main__":`, which is no condition for a script."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def last_name(node: ast.expr) -> str:
    """The last part of a dotted name; "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _assigned_name(node: ast.Assign) -> str:
    """The name that an assignment gives something to, or the first of several that a call gives something to."""
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and target.elts and isinstance(node.value, ast.Call):
        target = target.elts[0]
    return target.id if isinstance(target, ast.Name) else ""
