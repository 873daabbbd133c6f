"""Reward settings: functions, limits, and the handling of samples that could not be scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Protocol

from annotated_types import Ge, Gt, Le

from strop.algorithms.group_functions.config import check_overlong
from strop.config.sections import code_of, section
from strop.rewards.judges.config import JudgeConfig, ServerConfig
from strop.sandbox.config import SandboxConfig
from strop.utils.field_types import FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveInt, Share
from strop.utils.user_files import divide_named_file

OnFailure = Literal["exclude", "fixed", "retry"]
MAX_WORKERS = 1024
"""Processes that score."""
TimeLimit = Annotated[float, Gt(0), "a time limit is a number of seconds"]

_MANAGERS_ELSEWHERE = {
    "naive": "leave it out: a function in reward.path is called for each answer",
    "batch": "leave it out: a function for whole batches in reward.path is recognised by its parameters",
    "prime": "leave it out: answers are scored at the same time in reward.num_workers processes",
    "dapo": "set reward.overlong_buffer and reward.overlong_penalty",
    "rate_limited": "leave it out: a service that scores has such limits of its own, requests_per_s and "
    "max_concurrent, and a function with `async def` has reward.max_concurrent",
}
"""Managers that users know by name, and what does their work here."""


class ServiceSection(Protocol):
    """The section of a service below reward."""

    ADDRESS: ClassVar[str]
    """Full key of the setting with its address."""

    @property
    def address(self) -> str:
        """URL of the service."""
        ...

    @property
    def scores(self) -> bool:
        """True if the service is used."""
        ...

    @property
    def compares(self) -> bool:
        """True if it compares the answers to a prompt, and scores none by itself."""
        ...

    @property
    def has_price(self) -> bool:
        """True if requests cost something, which the run then counts."""
        ...


@section("reward.functions")
class FunctionConfig:
    """One of several reward functions."""

    path: str = ""
    """Python file, relative to the current directory. Empty: the scorer that belongs to the row's `data_source`."""
    name: str = "compute_score"
    """Name of the function in that file; the path may name it too, FILE.py:FUNCTION."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments for the function, the same for every sample."""
    weight: FiniteFloat = 1.0
    """Of its score in the sum."""
    key: str = ""
    """Name of its score in metrics and samples. Empty: the name of the function."""

    def __post_init__(self) -> None:
        divide_named_file(self, default="compute_score")
        _check_function("reward.functions", self.path, self.name)

    @property
    def part(self) -> str:
        """Name of its score."""
        return self.key or (self.name if self.path else "rule")


@section("reward.on_failure")
class OnFailureConfig:
    """Handling of a sample that could not be scored, by the reason.

    exclude: it is left out of training. fixed: it is trained with reward.failed_score. retry: it is scored again, up
    to reward.retries times, and then left out.
    """

    error: OnFailure = "exclude"
    """The function failed, or returned no number."""
    timeout: OnFailure = "exclude"
    """The function took longer than its limit."""
    infrastructure: OnFailure = "retry"
    """A service that scoring needs failed, which says nothing about the answer."""


@section("reward")
class RewardConfig:
    path: str = ""
    """Python file with the reward function, relative to the current directory. Empty: the scorer that
    belongs to the row's `data_source`."""
    name: str = "compute_score"
    """Name of the function in that file; the path may name it too, FILE.py:FUNCTION."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments for the function, the same for every sample."""
    manager: str = ""
    """A reward manager in that file, in place of the function: its class, or the name it is registered with
    (strop.rewards.managers). The function `name` of the file becomes its compute_score; kwargs go to it."""
    weight: Annotated[FiniteFloat, "0 leaves the function out"] = 1.0
    """Factor of the function's score in training. 0 leaves the reward to a reward model; pass
    rates are still those of the function."""
    num_workers: Annotated[int, Ge(1), Le(MAX_WORKERS), "that many processes are started"] = 2
    """Processes that score at the same time."""
    max_concurrent: PositiveInt = 32
    """Calls of a function with `async def` that each of these processes has under way at the same time; 1: one after
    the other. A process takes one call at a time of functions without."""
    timeout_s: TimeLimit = 10.0
    """Wall-clock limit for scoring one sample, in seconds; times the number of answers where a function takes all
    answers to a prompt at once. Time in a sandbox is not counted. A process that exceeds it is killed."""
    start_timeout_s: TimeLimit = 120.0
    """Wall-clock limit for loading the reward file with all its imports, in seconds."""
    max_memory_gib: Annotated[float, Gt(0), "null is no limit"] | None = 4.0
    """Memory one worker may allocate, in GiB; a function that asks for more gets a MemoryError. null: no
    limit."""
    functions: tuple[FunctionConfig, ...] = ()
    """Several functions, whose weighted scores are added, in place of path, name and kwargs. Each score is a part of
    its own in metrics and samples."""
    pass_by: str = ""
    """Name of the function, or of the service, whose score decides which answers pass. Empty: the `acc` that a function
    gives, or a single reward of 0 or 1; where there is neither, there is no pass rate, only a mean reward."""
    pass_threshold: FiniteFloat = 0.5
    """Score from which on an answer passes, where pass_by is set."""
    on_failure: OnFailureConfig = field(default_factory=OnFailureConfig)
    """Handling of a sample that could not be scored."""
    failed_score: FiniteFloat = 0.0
    """Score that such a sample is trained with where on_failure says fixed."""
    retries: Annotated[PositiveInt, "to score nothing again, use exclude in reward.on_failure"] = 1
    """Number of times such a sample is scored again where on_failure says retry."""
    max_failed_share: Annotated[Share, "use 0.2 for 20 %"] = 0.2
    """Share of a step's samples that may fail to be scored; above it the run stops."""
    overlong_buffer: Annotated[NonNegativeInt, "0 tokens are no penalty"] = 0
    """DAPO's soft penalty on long responses: it begins this many tokens below data.max_response_tokens; 0: none."""
    overlong_penalty: Annotated[NonNegativeFloat, "it is taken off the reward"] = 1.0
    """The full penalty, at the limit, in reward units."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    def __post_init__(self) -> None:
        check_overlong(self.overlong_penalty, self.overlong_buffer)
        divide_named_file(self, default="compute_score")
        self._check_functions()
        self._check_passing()
        self._check_on_failure()
        _check_function("reward", self.path, self.name)

    def _check_functions(self) -> None:
        if self.manager in _MANAGERS_ELSEWHERE:
            raise ValueError(
                f"reward.manager is {self.manager!r}, which is built in here under other keys: "
                f"{_MANAGERS_ELSEWHERE[self.manager]}"
            )
        if self.manager and not self.path:
            raise ValueError(
                f"reward.manager is {self.manager!r}, but reward.path is empty: set it to the file that defines it"
            )
        if self.functions and (self.path or self.kwargs or self.name != "compute_score"):
            raise ValueError(
                "reward.functions is set together with reward.path, reward.name or reward.kwargs: put that function "
                "into the list as well"
            )
        if self.kwargs and not self.uses_functions:
            raise ValueError(
                "reward.kwargs is set, but no function scores: set reward.path, or reward.functions=[{}] for the "
                "scorer of the data source"
            )
        keys = [function.part for function in self.functions]
        keys += [self.part] if self.uses_functions and not self.functions and self.services else []
        keys += self.services
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(
                    f"two parts of the reward have the name {key!r}: give each function a key of its own"
                )
            if key in ("score", "acc", "pred", "reward"):
                raise ValueError(
                    f"a reward function has the key {key!r}, which means something else: choose another"
                )

    def _check_passing(self) -> None:
        if not self.pass_by:
            if self.pass_threshold != 0.5:
                raise ValueError(
                    f"reward.pass_threshold is {self.pass_threshold}, but reward.pass_by is empty, so nothing uses it: "
                    f"set reward.pass_by to the function whose score it is for, or remove it"
                )
            return
        names = [function.part for function in self.functions]
        names += [self.part] if self.uses_functions and not self.functions else []
        names += self.services
        if self.pass_by not in names:
            near = get_close_matches(self.pass_by, names, n=1)
            raise ValueError(
                f"reward.pass_by is {self.pass_by!r}, which scores nothing here: "
                + (f"did you mean {near[0]!r}? " if near else "")
                + f"it is one of {', '.join(names)}"
            )

    def _check_on_failure(self) -> None:
        used = {self.on_failure.error, self.on_failure.timeout, self.on_failure.infrastructure}
        if self.failed_score and "fixed" not in used:
            raise ValueError(
                f"reward.failed_score is {self.failed_score}, but nothing uses it: set reward.on_failure.error=fixed, "
                f"or remove it"
            )
        if self.retries != 1 and "retry" not in used:
            raise ValueError(
                f"reward.retries is {self.retries}, but nothing in reward.on_failure is retry: set it there, or "
                "remove it"
            )

    @property
    def part(self) -> str:
        """Name of the score of the one function, where a service scores as well."""
        return self.name if self.path else "rule"

    @property
    def is_single(self) -> bool:
        """One function scores, or one service that compares no answers, and nothing beside it."""
        num_functions = max(len(self.functions), 1) if self.uses_functions else 0
        return num_functions + len(self.services) == 1 and not self.compares

    @property
    def uses_functions(self) -> bool:
        """False where services alone score."""
        return bool(self.path or self.functions) or not self.services

    @cached_property
    def compares(self) -> bool:
        """A service compares the answers to a prompt."""
        return any(service.compares for service in self.services.values())

    @cached_property
    def services(self) -> Mapping[str, ServiceSection]:
        """Services that score as well, by the names of their sections, which are those of their parts too."""
        sections: dict[str, ServiceSection] = {"judge": self.judge, "server": self.server}
        return {name: section for name, section in sections.items() if section.scores}

    def code_references(self) -> Iterator[tuple[str, str, str]]:
        """Code, programs and services that scoring would use; see strop.config.sections.code_of."""
        if self.path:
            yield "path", self.path, self.path
        for function in self.functions:
            if function.path:
                yield "functions", function.path, function.path
        for name in ("judge", "server", "sandbox"):
            for reference in code_of(getattr(self, name), name):
                yield reference.key, reference.value, reference.path


def _check_function(section: str, path: str, name: str) -> None:
    if not name.isidentifier():
        raise ValueError(f"{section}.name is {name!r}, which cannot be the name of a Python function")
    if not path and name != "compute_score":
        raise ValueError(
            f"{section}.name is {name!r}, but {section}.path is empty: set {section}.path to the file that "
            f"defines it, or leave {section}.name out"
        )
