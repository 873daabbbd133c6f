"""What rendering a chat template may cost: a template comes with a model, and a model may come from anybody.

A template is a program. Jinja's sandbox keeps it from files and processes, but not from looping for ever or from making
a text of gigabytes. Here every loop, call, filter, comparison and operation is paid for from a budget of steps *before*
it is done, and the budget is in proportion to the messages. Counting steps, not seconds, gives the same answer on every
machine; a text counts a step for every 32 characters.

What is not known to take time in proportion to its arguments pays for the product of their sizes: such a template still
works on what people write, and ends on what an attacker does.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from types import BuiltinMethodType, MethodType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg

from strop.utils.chat_template import OutOfSteps, strftime_now

BASE_STEPS = 1_000_000
"""Of any rendering: about a second."""
STEPS_PER_PIECE = 200
"""More of them for each value, and for each 32 characters, that a template is given.

Of 25 templates of well-known models most need below 10, with 128,000 tokens, 200 tools or 500 turns. Two go through all
messages again at each call of a tool (gpt-oss, Command R7B): 100 of them at 500 calls.
"""
_CHARS = 5  # 2**5 characters are a step
_ITEMS = 3  # to copy 2**3 references is one
_MAX_DEPTH = 200
_MAX_NUMBER = 10_000
"""As an argument: widths and counts, of which nothing in a chat needs more."""
_WIDE = re.compile(r"\d{5}|\*")
_NESTED = re.compile(r":[^{}]*\{")


class _StepBudget(threading.local):
    left: float | None = None
    """None outside of a rendering."""
    spent = 0.0


_budget = _StepBudget()


def spend(steps: float) -> None:
    """Pay for what comes next.

    Raises:
        OutOfSteps: there is not so much left.
    """
    if _budget.left is None:
        return
    _budget.spent += steps
    _budget.left -= steps
    if _budget.left < 0:
        raise OutOfSteps


def weight(value: Any) -> int:
    """Pieces of a value, counted as often as they would be written: one each, and one more for 32 characters.

    Raises:
        OutOfSteps: there are more than the budget has, or they are nested too deeply.
    """
    total, level, depth = 0, [value], 0
    limit = _budget.left if _budget.left is not None else float("inf")
    while level:
        depth += 1
        below: list[Any] = []
        for one in level:
            total += 1 + _flat(one)
            if isinstance(one, dict):
                below += one.keys()
                below += one.values()
            elif isinstance(one, Namespace):
                below += object.__getattribute__(one, "_Namespace__attrs").values()
            elif isinstance(one, list | tuple | set | frozenset):
                below += one
            if total > limit or len(below) > limit:
                raise OutOfSteps
        if depth > _MAX_DEPTH and below:
            raise OutOfSteps
        level = below
    return total


def _flat(value: Any) -> int:
    """Steps for one pass over a value, not over what is in it."""
    if isinstance(value, str | bytes):
        return len(value) >> _CHARS
    if isinstance(value, bool | float | None):
        return 0
    if isinstance(value, int):
        return value.bit_length() >> 6
    return len(value) >> _ITEMS if isinstance(value, Sized) and not isinstance(value, LoopContext) else 0


def _length(value: Any) -> int:
    """Steps to go through a value item by item."""
    return len(value) if isinstance(value, Sized) and not isinstance(value, LoopContext) else 0


def _seen(value: Any) -> Any:
    """The value, paid for with all that is in it."""
    spend(1 + _flat(value) if isinstance(value, str | int | None) else weight(value))
    return value


def _passed(value: Any) -> Any:
    """The value, paid for without what is in it."""
    spend(1 + _flat(value))
    return value


def _counted(items: Any) -> Any:
    """What is looped over: paid for at once where its length is known, else item by item."""
    if isinstance(items, Sized) and not isinstance(items, jinja2.Undefined):
        spend(1 + len(items))
        return items
    return _each(items) if isinstance(items, Iterator) else items


def _each(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        spend(1)
        yield item


class _Code(CodeGenerator):
    """Writes the payments into the program that a template becomes."""

    def blockvisit(self, nodes_: Iterable[nodes.Node], frame: Frame) -> None:
        block = list(nodes_)
        written = sum(len(text.data) for node in block if isinstance(node, nodes.Output)
                      for text in node.nodes if isinstance(text, nodes.TemplateData))  # fmt: skip
        self.writeline(f"environment.spend({1 + len(block) + (written >> _CHARS)})")
        super().blockvisit(block, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None).set_environment(self.environment)
        self.filters.setdefault("_counted", "environment.counted")
        super().visit_For(node, frame)

    def _paid(self, name: str, node: nodes.Node, frame: Frame) -> None:
        self.write(f"environment.{name}(")
        self.visit(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        is_safe = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        self.write(f"{'markup_join' if is_safe else 'str_join'}((")
        for arg in node.nodes:
            self._paid("seen", arg, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("(")
        self._paid("seen", node.expr, frame)
        for operand in node.ops:
            self.write(f" {_OPERATORS[operand.op]} ")
            self._paid("seen", operand.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self._paid("passed", node.node, frame)
        self.write("[")
        self.visit(node.arg, frame)
        self.write("]")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("{")
        for item in node.items:
            self._paid("seen", item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")


_OPERATORS = {
    "eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in", "notin": "not in",
}  # fmt: skip


class _Template(jinja2.Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        with _rendering(args, kwargs):
            return super().render(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        with _rendering(args, kwargs):
            yield from super().generate(*args, **kwargs)


@contextlib.contextmanager
def _rendering(args: Any, kwargs: Any) -> Iterator[None]:
    """A budget in proportion to what a template is given."""
    before = _budget.left, _budget.spent
    _budget.left = None
    try:
        pieces = weight([args, kwargs])
    except OutOfSteps:
        raise ValueError(f"the messages are nested more than {_MAX_DEPTH} deep") from None
    _budget.left, _budget.spent = BASE_STEPS + STEPS_PER_PIECE * pieces, 0.0
    try:
        yield
    except (RecursionError, MemoryError) as error:
        raise OutOfSteps(type(error).__name__) from None
    finally:
        _budget.left, _budget.spent = before


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of another one's settings, filters and functions, in which everything is paid for."""

    code_generator_class = _Code
    template_class = _Template
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    spend = staticmethod(spend)
    seen, passed, counted = staticmethod(_seen), staticmethod(_passed), staticmethod(_counted)

    def __init__(self, like: jinja2.Environment) -> None:
        super().__init__(
            trim_blocks=like.trim_blocks,
            lstrip_blocks=like.lstrip_blocks,
            extensions=[type(one) for one in like.extensions.values()],
            finalize=_seen,
        )
        self.filters = {name: _paid_filter(name, one) for name, one in like.filters.items()}
        self.filters["_counted"] = _counted
        self.tests = {
            name: _paid_test(cast("Callable[..., Any]", one)) if name in _COMPARING else one
            for name, one in like.tests.items()
        }
        self.globals.update(
            {name: one for name, one in like.globals.items() if name not in ("range", "lipsum")}
        )
        self.globals.pop("lipsum", None)  # texts by chance, of any length
        self.globals["strftime_now"] = strftime_now

    def from_string(self, *args: Any, **kwargs: Any) -> jinja2.Template:
        """As of Jinja.

        Raises:
            OutOfSteps: the template is nested too deeply to be compiled.
        """
        try:
            return super().from_string(*args, **kwargs)
        except (RecursionError, MemoryError) as error:
            raise OutOfSteps(type(error).__name__) from None

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """As of the sandbox."""
        spend(1 + _cost_of_operator(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As of the sandbox."""
        return super().getitem(obj, argument if isinstance(argument, str | int) else _seen(argument))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """As of the sandbox."""
        args = _pay_for_call(__obj, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        return _each(result) if isinstance(result, Iterator) else result


def _cost_of_operator(operator: str, left: Any, right: Any) -> float:
    sizes = _flat(left), _flat(right)
    if operator == "%" and isinstance(left, str | bytes):
        text = left if isinstance(left, str) else left.decode("latin-1")
        _refuse(_WIDE.search(text) is not None)
        return sizes[0] + (1 + text.count("%")) * weight(right)
    if operator == "*":
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | bytes | list | tuple) and isinstance(times, int):
                return max(0, times) * len(repeated) / (1 if isinstance(repeated, list | tuple) else 32)
        return float((1 + sizes[0]) * (1 + sizes[1]))
    if operator == "**":
        is_small = isinstance(right, float) or abs(right) * max(1, _bits(left)) <= _MAX_NUMBER
        _refuse(not is_small)
        return 64
    if operator in ("/", "//", "%"):
        return float((1 + sizes[0]) * (1 + sizes[1]))
    return sizes[0] + sizes[1]


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _refuse(is_refused: bool) -> None:
    if is_refused:
        raise OutOfSteps


# ------------------------------------------------------------------------------------------------------ calls

_OF_JINJA = ("_loop_vars", "_block_vars")
"""What Jinja itself adds to the arguments of every call in a loop or block: all variables that were set there."""
_FREE_NAMES = frozenset(
    {"raise_exception", "TemplateNamespace", "Namespace", "safe_range", "TemplateDict", "dict"}
)
_ONE_PASS = frozenset({
    "capitalize", "casefold", "copy", "count", "decode", "encode", "endswith", "find", "index", "isalnum", "isalpha",
    "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
    "isupper", "lower", "partition", "removeprefix", "removesuffix", "startswith", "swapcase", "title", "upper",
})  # fmt: skip


def _pay_for_call(called: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Pay for a call; its arguments, which may have been gone through for that."""
    spend(1 + len(args) + len(kwargs))  # of *args and **kwargs there may be many
    name = getattr(called, "__name__", type(called).__name__)
    if isinstance(called, LoopContext):  # goes through what it is given
        spend(sum(len(one) for one in args if isinstance(one, Sized)))
        return args
    if isinstance(called, Macro | BlockReference):  # their own blocks pay
        return args
    kwargs = {key: value for key, value in kwargs.items() if key not in _OF_JINJA}
    if name in _FREE_NAMES:
        spend(weight(args))
        return args
    if name == "_generation_support":  # joins all that was written so far
        spend(int(_budget.spent) >> 6)
        return args
    method = getattr(called, "__wrapped__", called)
    owner = getattr(method, "__self__", None) if isinstance(method, BuiltinMethodType | MethodType) else None
    if isinstance(owner, str):
        return _pay_for_text(owner, name, args, kwargs)
    if isinstance(owner, dict):
        spend(len(owner) if name == "copy" else weight(args))
        return args
    _refuse_wide(args, kwargs)
    spend((1 + weight(owner)) * (1 + weight([args, kwargs])) if owner is not None else weight([args, kwargs]))
    return args


def _pay_for_text(owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The same for a method of a text."""
    size = len(owner)
    if name == "join" and args:
        items = args[0] if isinstance(args[0], list | tuple | str) else list(_counted(args[0]))
        spend(weight(items) + (size * len(items) >> _CHARS))
        return (items,)
    if name == "replace" and len(args) + len(kwargs) >= 2 and all(isinstance(one, str) for one in args[:2]):
        new = args[1] if len(args) > 1 else kwargs.get("new", "")
        spend(((owner.count(args[0]) if args else size) * len(new) + size) >> _CHARS)
        return args
    if name in ("format", "format_map"):
        _refuse(_WIDE.search(owner) is not None)
        if _NESTED.search(owner):
            _refuse_wide(args, kwargs)
        spend((size >> _CHARS) + (1 + owner.count("{")) * weight([args, kwargs]))
        return args
    _refuse_wide(args, kwargs)
    if name in ("split", "rsplit", "splitlines"):
        divider = args[0] if args and isinstance(args[0], str) else kwargs.get("sep")
        length = len(divider) if isinstance(divider, str) else 0
        parts = owner.count(divider) if isinstance(divider, str) and divider else size >> 3
        spend(parts + (size * (1 + length if name == "rsplit" else 1) >> _CHARS))
    elif name in _ONE_PASS:
        spend((size >> _CHARS) + weight([args, kwargs]))
    elif name in ("center", "ljust", "rjust", "zfill"):
        spend((size + _MAX_NUMBER) >> _CHARS)
    else:  # from the right, sets of characters, and what is not known: the product
        given = [*args, *kwargs.values()]
        others = sum(len(one) if isinstance(one, str) else weight(one) for one in given)
        spend((1 + size) * (1 + others) >> _CHARS)
    return args


def _refuse_wide(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    numbers = [one for one in (*args, *kwargs.values()) if isinstance(one, int | float)]
    _refuse(any(abs(one) > _MAX_NUMBER for one in numbers))


# ---------------------------------------------------------------------------------------------------- filters

_COMPARING = frozenset({"eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">",
                        "ge", ">=", "in"})  # fmt: skip
_SHALLOW = frozenset({
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr",
    "reverse", "select", "selectattr", "slice",
})  # fmt: skip
"""They pass over a value once and not over what is in it."""
_AT_ONCE = frozenset({"attr", "count", "d", "default", "first", "last", "length"})
"""They do not even pass over it."""
_LINEAR = frozenset({
    "abs", "capitalize", "center", "e", "escape", "float", "forceescape", "int", "lower", "replace", "round", "safe",
    "string", "title", "tojson", "trim", "truncate", "unique", "upper", "urlencode", "wordcount", "join", "indent",
    "dictsort", "format", "max", "min",
})  # fmt: skip


def _paid_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which pays for its work first."""
    passed = _PassArg.from_obj(function)

    @jinja2.pass_context
    def filtered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, Iterator):
            value = _each(value)
            if name not in _SHALLOW:
                value = list(value)
        if name not in _SHALLOW or name in ("batch", "slice"):
            _refuse_wide(args, kwargs)
        size = 1 if name in _AT_ONCE else 1 + _length(value) if name in _SHALLOW else weight(value)
        spend(size + weight([args, kwargs]) + _cost_of_filter(name, value, size, args, kwargs))
        first = {None: (), _PassArg.context: (context,), _PassArg.eval_context: (context.eval_ctx,),
                 _PassArg.environment: (context.environment,)}[passed]  # fmt: skip
        result = function(*first, value, *args, **kwargs)
        return _each(result) if isinstance(result, Iterator) else result

    return filtered


def _cost_of_filter(
    name: str, value: Any, size: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> float:
    """What a filter costs beyond one pass over its value and arguments."""
    given = [*args, *kwargs.values()]
    widths = 1 + sum(
        abs(one) if isinstance(one, int) else len(one) for one in given if isinstance(one, int | str)
    )
    if name == "replace":
        text, new = str(value), str(args[1] if len(args) > 1 else kwargs.get("new", ""))
        old = str(args[0] if args else kwargs.get("old", ""))
        return text.count(old) * len(new) / 32
    if name == "join":
        return (len(value) if isinstance(value, Sized) else 1) * widths / 32
    if name == "indent":
        return str(value).count("\n") * widths / 32
    if name == "format":
        _refuse(_WIDE.search(str(value)) is not None)
        return (1 + str(value).count("%")) * weight(given)
    if name == "tojson":
        return size * (widths - 1) * 8 / 32
    if name in ("trim", "batch", "slice", "map"):
        return size * widths / 32
    if name in ("sort", "groupby", "dictsort"):
        return 20.0 * size
    return 0 if name in _LINEAR | _SHALLOW else float(size) * (size + widths)


def _paid_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_context
    def tested(context: Context, value: Any, *args: Any) -> Any:
        return function(_seen(value), *(_seen(one) for one in args))

    return tested
