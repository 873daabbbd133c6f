"""RewardFunction: called in its own convention in the worker process, and its answer read.

A function is called as `compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)`, with those of
them that it takes. Functions in the forms of TRL and OpenRLHF are each known by one of their parameters. Each
may be `async def`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import numbers
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from strop.rewards.combine import Part
from strop.rewards.outcome import Value, usable_part
from strop.utils.sanitize import real, usable
from strop.utils.sanitize.text import describe_object
from strop.utils.sanitize.values import MAX_NUMBER
from strop.utils.user_files import from_elsewhere, modules_beside

MODULE_NAME = "strop_user_reward"
SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Arguments that a function may take."""


class LoadError(Exception):
    """The function cannot be loaded; the message is one sentence for the user."""


class BadReturnError(Exception):
    """The function returned something that is no reward."""


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A loaded reward function and how it wants to be called."""

    function: Callable[..., Any]
    label: str
    """Name in error sentences: `compute_score in reward.py`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    """Names the function accepts as keywords."""
    takes_any: bool = True
    """True when it has **kwargs."""
    required: frozenset[str] = frozenset()
    """Names without a default."""
    path: str = ""
    """Its file; empty for the built-in scorers."""
    key: str = ""
    """Name of its part of the reward; empty where it is the only function."""
    weight: float = 1.0
    """Of its score, where there are several functions."""
    wants_conversation: bool = False
    """It is sent prompt, answer and columns of the row as such, too."""
    takes_groups: ClassVar[bool] = False
    """It is called once for all answers to a prompt (`call_all`, `read_all`)."""

    @property
    def is_coroutine(self) -> bool:
        """It is declared with `async def`, and so waits for something, in a loop that may wait for other calls too."""
        forms = (self.function, type(self.function).__call__)  # the second of an instance that is called
        return any(map(inspect.iscoroutinefunction, forms))

    def prepare(self, data_source: str) -> None:
        """Import what scoring this data source needs, before the clock of a sample runs. A user's function needs
        nothing more than its file."""

    def __call__(self, call: Mapping[str, Any]) -> Any:
        """Call the function for one answer; returns its value unread, possibly a coroutine."""
        arguments = {name: call[name] for name in SINGLE if self.takes_any or name in self.parameters}
        return self.function(**arguments, **self.kwargs)

    def call_all(self, calls: Sequence[Mapping[str, Any]]) -> Any:
        """Call the function once for all answers to a prompt, where it takes groups."""
        raise NotImplementedError

    def read_all(self, returned: object, count: int) -> list[Part | BadReturnError]:
        """Part of each of `count` answers in a returned value, or the reason why there is none."""
        raise NotImplementedError

    def read(self, returned: object) -> Part:
        """Score and parts of a returned value.

        Raises:
            BadReturnError: it is no finite number, and no dictionary with one under "score".
        """
        if not isinstance(returned, Mapping):
            score = self._number(returned, "returned")
            return self.part(score, {})
        if "score" not in returned:
            raise BadReturnError(
                f'{self.label} returned a dictionary without "score": {shown(dict(returned))}'
            )
        score = self._number(returned["score"], "returned a dictionary whose score is")
        parts = {
            str(key): read_part(value)
            for key, value in returned.items()
            if key != "score" and value is not None
        }
        return self.part(score, parts)

    def part(self, score: float | None, parts: Mapping[str, Value]) -> Part:
        """Part with this function's key and weight; score None where it does not apply to the sample."""
        return Part(key=self.key, weight=self.weight, score=score, parts=parts)

    def _number(self, value: object, verb: str) -> float:
        if (
            not isinstance(value, numbers.Real)
            and getattr(value, "shape", None) == ()
            and hasattr(value, "item")
        ):
            value = value.item()  # a tensor or array without dimensions
        if not isinstance(value, numbers.Real):
            raise BadReturnError(
                f"{self.label} {verb} {shown(value)}, which is no number; return a number or a dictionary "
                f'with a number under "score"'
            )
        number = usable(value)
        if number is None:
            raise BadReturnError(
                f"{self.label} {verb} {real(value)}; return a finite number from {-MAX_NUMBER:g} to {MAX_NUMBER:g}"
            )
        return number


def shown(value: object) -> str:
    """A value in a sentence."""
    text = describe_object(value)
    return (
        "None"
        if value is None
        else f"the {type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}"
    )


def read_part(value: object) -> Value:
    """A value beside the score as a part of the reward."""
    if not isinstance(value, str) and hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    return usable_part(value if isinstance(value, (str, numbers.Real)) else str(value))


# Not of importlib.abc, which imports what reads archives and makes temporary files: a third of the imports of a worker.
class _Snapshot(importlib.machinery.SourceFileLoader):
    """Loads the source that the parent read at start, so that a replaced worker runs the same code."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"no cached code of {path}")

    def get_data(self, path: str) -> bytes:
        if path != self.path:
            raise OSError(f"no cached code at {path}")
        return self._source.encode()


def check_supplied(function: RewardFunction, names: Collection[str]) -> None:
    """Refuse a function with a parameter that it is not given.

    Raises:
        LoadError: it has one that is neither among these names nor in its kwargs.
    """
    if missing := function.required - set(names) - function.kwargs.keys():
        raise LoadError(
            f"{function.label} ({function.path}) asks for {', '.join(sorted(missing))}, which strop does not pass: "
            f"set it in reward.kwargs, or take data_source, solution_str, ground_truth and extra_info"
        )


def load_module(path: str, source: str, number: int = 0) -> ModuleType:
    """A file of the user's, imported from the source that was read at start.

    Raises:
        LoadError: it cannot be.
    """
    name = f"{MODULE_NAME}_{number}" if number else MODULE_NAME
    spec = importlib.util.spec_from_file_location(name, path, loader=_Snapshot(name, path, source))
    assert spec is not None, "the loader names its file"
    assert spec.loader is not None, "a spec made from a loader has that loader"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).parent))  # also for imports inside its functions
    sys.modules[name] = module
    try:
        with modules_beside(Path(path)):
            spec.loader.exec_module(module)
    except BaseException as error:  # the file is the user's; its failure becomes one sentence
        traceback.print_exc()
        problem = f"{describe(error, path)}{from_elsewhere(error)}"
        raise LoadError(f"reward file {path} cannot be imported: {problem}") from error
    return module


def describe(error: BaseException, path: str) -> str:
    """`ZeroDivisionError: division by zero at reward.py:41`: the error and the user's last line before it."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} at {Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    at = next((frame for frame in reversed(frames) if frame.filename == path), None)
    if at is None and frames and not path and not isinstance(error, ValueError):
        at = frames[-1]  # a mistake in a built-in scorer; its ValueErrors are sentences for the user
    return f"{text} at {Path(at.filename).name}:{at.lineno}" if at else text
