"""All mutants of a module: where they are, what they change, and the text of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.operators.operator import Operator
from operators import OPERATORS
from parso.tree import BaseNode, NodeOrLeaf

# Operators of cosmic-ray take these leaves for arithmetic wherever they stand: *args, **kwargs, the * of a signature.
ARITHMETIC_PARENTS = {"arith_expr", "term", "power", "expr", "and_expr", "xor_expr", "shift_expr"}
ARITHMETIC = re.compile(r"[A-Z]\w+_(Add|Sub|Mul|Div|FloorDiv|Pow|LShift|And|Or|BitAnd|BitOr)$")
SKIPPED_PARENTS = {"raise_stmt", "fstring", "import_from", "import_name", "assert_stmt"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change to one module."""

    module: str
    """Dotted, below strop."""
    function: str
    """Dotted name of the innermost def or class around the change; empty at the top of the module."""
    operator: str
    """Name in OPERATORS."""
    occurrence: int
    """Number among the operator's places in the module."""
    lines: range
    """Lines of the statement that is changed."""
    runs_at_import: bool
    """The change is not inside the body of a function: a constant, a default, a decorator, a field."""
    is_default: bool
    """The change is in the default of a parameter."""
    old: str
    """The first changed line before the change, without indentation."""
    new: str
    """The same line after it."""
    nth: int
    """Number among the mutants of the same function with equal operator, old and new."""

    @property
    def key(self) -> str:
        """Names the mutant for as long as its line stays as it is."""
        again = f" ({self.nth + 1})" if self.nth else ""
        return f"{self.module}::{self.function}::{self.operator}{again}: {self.old}  ->  {self.new}"


def module_name(path: Path, package: Path) -> str:
    """Dotted name of a file below the package, e.g. algorithms.losses.clipped."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts)


def mutants_of(path: Path, package: Path) -> Iterator[tuple[Mutant, str]]:
    """Each mutant of a file with the module's text after the change, in the order of the operators."""
    source = path.read_text(encoding="utf-8")
    root = parso.parse(source)
    nodes = list(ast_nodes(root))
    seen: Counter[tuple[str, ...]] = Counter()
    for name, operator in OPERATORS.items():
        occurrence = -1
        for node in nodes:
            for index, (start, _) in enumerate(list(operator.mutation_positions(node))):
                occurrence += 1
                place = node if node.start_pos == start else node.get_leaf_for_position(start) or node
                if _is_skipped(name, node, place):
                    continue
                mutated = _text_with(root, node, operator, index)
                if mutated == source or not _compiles(mutated):
                    continue
                old, new = _first_difference(source, mutated)
                function, runs_at_import = _surroundings(node)
                identity = (function, name, old, new)
                yield (
                    Mutant(
                        module=module_name(path, package),
                        function=function,
                        operator=name,
                        occurrence=occurrence,
                        lines=_statement_lines(place),
                        runs_at_import=runs_at_import,
                        is_default=runs_at_import
                        and any(parent.type == "param" for parent in _parents(place)),
                        old=old,
                        new=new,
                        nth=seen[identity],
                    ),
                    mutated,
                )
                seen[identity] += 1


def _text_with(root: BaseNode, node: NodeOrLeaf, operator: Operator, index: int) -> str:
    """The module's text with one change, which is taken back."""
    before = [
        (part, part.children[:] if isinstance(part, BaseNode) else part.value) for part in ast_nodes(node)
    ]
    siblings = node.parent.children
    kept = siblings[:]
    at = next(number for number, sibling in enumerate(siblings) if sibling is node)
    changed = operator.mutate(node, index)
    siblings[at : at + 1] = [] if changed is None else [changed]
    text: str = root.get_code()
    siblings[:] = kept
    for part, content in before:
        if isinstance(part, BaseNode):
            part.children = content
        else:
            part.value = content
    return text


def _compiles(source: str) -> bool:
    try:
        compile(source, "<mutant>", "exec")
    except SyntaxError:
        return False
    return True


def _parents(node: NodeOrLeaf) -> Iterator[NodeOrLeaf]:
    while node.parent is not None:
        yield node.parent
        node = node.parent


def _is_skipped(operator: str, node: NodeOrLeaf, place: NodeOrLeaf) -> bool:
    """Types, messages, docstrings, Protocols, and checks of what no caller can reach have no mutants."""
    if ARITHMETIC.match(operator) and node.type == "operator" and node.parent.type not in ARITHMETIC_PARENTS:
        return True
    if "TYPE_CHECKING" in place.get_code():
        return True  # imports for types, which may as well run
    if operator == "RemoveDecorator" and "cache" in node.get_code():
        return True  # it changes speed only
    child = node
    for parent in _parents(place):
        if parent.type in SKIPPED_PARENTS:
            return True
        if parent.type == "param" and (parent.default is None or not _is_inside(place, parent.default)):
            return True
        if parent.type == "parameters" and child.type != "param" and place.parent is parent:
            return True
        if (
            parent.type == "funcdef"
            and parent.annotation is not None
            and _is_inside(place, parent.annotation)
        ):
            return True
        if parent.type == "annassign" and (
            "TypeAlias" in parent.get_code() or _is_inside(place, parent.children[1])
        ):
            return True
        if parent.type == "argument" and parent.get_code().strip().startswith(("strict=", "non_blocking=")):
            return True  # of zip: lengths that were checked before; of a copy to a device: when it is awaited
        if parent.type == "classdef" and "Protocol" in parent.get_code().partition(":")[0]:
            return True
        if parent.type == "decorator" and "cache" in parent.get_code():
            return True
        child = parent
    return False


def _is_inside(node: NodeOrLeaf, outer: NodeOrLeaf) -> bool:
    return outer.start_pos <= node.start_pos and node.end_pos <= outer.end_pos


def _surroundings(node: NodeOrLeaf) -> tuple[str, bool]:
    """Dotted name of the definitions around a node, and whether it runs at import."""
    names, runs_at_import = [], True
    for parent in _parents(node):
        if parent.type in ("funcdef", "classdef"):
            names.append(parent.name.value)
            if parent.type == "funcdef" and _is_inside(node, parent.children[-1]):
                runs_at_import = False
    return ".".join(reversed(names)), runs_at_import


def _statement_lines(place: NodeOrLeaf) -> range:
    """Lines of the simple statement around a place, or of the head of the compound one."""
    node = place
    while node.parent is not None and node.parent.type not in ("suite", "file_input"):
        node = node.parent
        if node.type == "simple_stmt":
            return range(node.start_pos[0], node.children[0].end_pos[0] + 1)
    end = place.end_pos[0] if place.type != "decorator" else place.start_pos[0]
    return range(node.start_pos[0] if node.type != "decorated" else place.start_pos[0], end + 1)


def _first_difference(source: str, mutated: str) -> tuple[str, str]:
    for old, new in zip(source.splitlines(), mutated.splitlines(), strict=False):
        if old != new:
            return old.strip(), re.sub(r"(?<=\S) {2,}", " ", new.strip())
    return "", ""
