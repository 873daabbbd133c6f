"""The changes that make a mutant: a choice of cosmic-ray's operators, and a few that numerical code needs.

Of all pairs of operators only those are taken that a mistake could produce and a test could miss: the neighbour
(`<` and `<=`) and the opposite (`<` and `>=`). The other pairs mostly raise at once and would only make the score
look better.
"""

from __future__ import annotations

from collections.abc import Iterator

from cosmic_ray.operators import (
    binary_operator_replacement,
    boolean_replacer,
    break_continue,
    comparison_operator_replacement,
    exception_replacer,
    number_replacer,
    remove_decorator,
    unary_operator_replacement,
    zero_iteration_for_loop,
)
from cosmic_ray.operators.operator import Operator
from parso.python.tree import Keyword, Name
from parso.python.tree import Operator as OperatorLeaf
from parso.tree import BaseNode, NodeOrLeaf

Position = tuple[tuple[int, int], tuple[int, int]]

BINARY_PAIRS = (
    "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul", "RShift_LShift",
    "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitAnd",
)  # fmt: skip
COMPARISON_PAIRS = (
    "Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt",
    "Is_IsNot", "IsNot_Is",
)  # fmt: skip
UNARY_PAIRS = ("Delete_USub", "Delete_Invert", "Delete_Not")

OPPOSITE_NAMES = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin",
    "any": "all", "all": "any", "sum": "mean", "mean": "sum", "fsum": "max", "zeros_like": "ones_like",
    "ones_like": "zeros_like", "zeros": "ones", "ones": "zeros", "floor": "ceil", "ceil": "floor",
    "masked_sum": "masked_mean", "masked_mean": "masked_sum", "startswith": "endswith", "endswith": "startswith",
}  # fmt: skip
OPPOSITE_UPDATES = {"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "|=": "&=", "&=": "|=", ">>=": "<<="}


class OppositeName(Operator):  # type: ignore[misc]  # cosmic-ray has no types
    """`min(...)` for `max(...)`, `zeros_like` for `ones_like`, and the like; only where the name is called."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        if isinstance(node, Name) and node.value in OPPOSITE_NAMES and _is_called(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Name, index: int) -> Name:
        node.value = OPPOSITE_NAMES[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class KeepGradient(Operator):  # type: ignore[misc]
    """`x` for `x.detach()`."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        if node.type == "trailer" and node.get_code() == ".detach":
            yield node.start_pos, node.end_pos

    def mutate(self, node: BaseNode, index: int) -> BaseNode:
        # A method that returns the tensor as it is.
        node.children[1].value = "contiguous"
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class OppositeUpdate(Operator):  # type: ignore[misc]
    """`-=` for `+=`, and the like."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        if isinstance(node, OperatorLeaf) and node.value in OPPOSITE_UPDATES:
            yield node.start_pos, node.end_pos

    def mutate(self, node: OperatorLeaf, index: int) -> OperatorLeaf:
        node.value = OPPOSITE_UPDATES[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class OppositeMembership(Operator):  # type: ignore[misc]
    """`not in` for `in` and back, in comparisons."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        if node.type == "comparison":
            for child in node.children[1::2]:
                if child.get_code().split() in (["in"], ["not", "in"]):
                    yield child.start_pos, child.end_pos

    def mutate(self, node: BaseNode, index: int) -> BaseNode:
        places = [
            at for at in range(1, len(node.children), 2) if "in" in node.children[at].get_code().split()
        ]
        child = node.children[places[index]]
        text = " in" if child.get_code().split() == ["not", "in"] else " not in"
        node.children[places[index]] = Keyword(text, child.start_pos)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


CONDITION_AT = {"if_stmt": 1, "while_stmt": 1, "ternary": 2, "test": 2, "comp_if": 1}
"""Number of the child that is the condition, by type of node."""


class NegateCondition(Operator):  # type: ignore[misc]
    """`not (...)` around what an if, a while, a conditional expression or a filter of a comprehension asks."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        for at in self._places(node):
            yield node.children[at].start_pos, node.children[at].end_pos

    def mutate(self, node: BaseNode, index: int) -> BaseNode:
        at = self._places(node)[index]
        condition = node.children[at]
        prefix = condition.get_first_leaf().prefix
        code = condition.get_code(include_prefix=False)
        node.children[at] = Keyword(f"{prefix}not ({code})", condition.start_pos)
        return node

    def _places(self, node: NodeOrLeaf) -> list[int]:
        if node.type not in CONDITION_AT:
            return []
        places = [CONDITION_AT[node.type]]
        if node.type == "if_stmt":
            places += [
                at + 1
                for at, child in enumerate(node.children)
                if isinstance(child, Keyword) and child.value == "elif"
            ]
        return places

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class DeleteStatement(Operator):  # type: ignore[misc]
    """`pass` for a call, a raise, an update, or an assignment to a name that is bound before."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        if node.type == "simple_stmt" and _is_deletable(node.children[0]):
            yield node.start_pos, node.end_pos

    def mutate(self, node: BaseNode, index: int) -> BaseNode:
        _replace_child(node, 0, "pass")
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class ReturnNone(Operator):  # type: ignore[misc]
    """`return None` for a return with a value."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        if node.type == "return_stmt" and node.children[1].get_code().strip() != "None":
            yield node.start_pos, node.end_pos

    def mutate(self, node: BaseNode, index: int) -> BaseNode:
        _replace_child(node, 1, "None")
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def _is_called(name: Name) -> bool:
    after = name.get_next_leaf()
    return name.parent.type != "funcdef" and after is not None and after.value == "("


def _replace_child(node: BaseNode, at: int, code: str) -> None:
    child = node.children[at]
    node.children[at] = Keyword(code, child.start_pos, child.get_first_leaf().prefix)


def _is_deletable(statement: NodeOrLeaf) -> bool:
    if statement.type in ("raise_stmt", "atom_expr", "power"):
        return True
    if statement.type != "expr_stmt" or statement.children[1].type == "annassign":
        return False
    target = statement.children[0]
    if target.type != "name" or statement.children[1].value != "=":
        return True
    return _is_bound_before(target)


def _is_bound_before(target: Name) -> bool:
    """The function names the target above this statement, so without the statement its older value is used."""
    function = target
    while function is not None and function.type != "funcdef":
        function = function.parent
    return function is not None and any(
        leaf.value == target.value
        for leaf in _leaves(function)
        if leaf.type == "name" and leaf.start_pos < target.start_pos
    )


def _leaves(node: NodeOrLeaf) -> Iterator[NodeOrLeaf]:
    if isinstance(node, BaseNode):
        for child in node.children:
            yield from _leaves(child)
    else:
        yield node


def _chosen(module: object, stem: str, pairs: tuple[str, ...]) -> dict[str, Operator]:
    return {pair: getattr(module, f"{stem}_{pair}")() for pair in pairs}


OPERATORS: dict[str, Operator] = {
    **_chosen(binary_operator_replacement, "ReplaceBinaryOperator", BINARY_PAIRS),
    **_chosen(comparison_operator_replacement, "ReplaceComparisonOperator", COMPARISON_PAIRS),
    **_chosen(unary_operator_replacement, "ReplaceUnaryOperator", UNARY_PAIRS),
    "Number": number_replacer.NumberReplacer(),
    "True_False": boolean_replacer.ReplaceTrueWithFalse(),
    "False_True": boolean_replacer.ReplaceFalseWithTrue(),
    "And_Or": boolean_replacer.ReplaceAndWithOr(),
    "Or_And": boolean_replacer.ReplaceOrWithAnd(),
    "Break_Continue": break_continue.ReplaceBreakWithContinue(),
    "Continue_Break": break_continue.ReplaceContinueWithBreak(),
    "NoIteration": zero_iteration_for_loop.ZeroIterationForLoop(),
    "Exception": exception_replacer.ExceptionReplacer(),
    "RemoveDecorator": remove_decorator.RemoveDecorator(),
    "OppositeName": OppositeName(),
    "OppositeUpdate": OppositeUpdate(),
    "OppositeMembership": OppositeMembership(),
    "KeepGradient": KeepGradient(),
    "NegateCondition": NegateCondition(),
    "DeleteStatement": DeleteStatement(),
    "ReturnNone": ReturnNone(),
}
"""What is done to the code, by the name that stands in the results."""
