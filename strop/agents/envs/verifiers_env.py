"""Tasks of the verifiers package: the task's prompt is asked, and its rewards score the answer.

A task has one answer, and rewards that read the conversation. Tasks that run a program of their
own around the model (containers, tool servers, set-up in a runtime) are refused with a sentence.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from strop.agents.envs.base import Observation
from strop.agents.tools.class_loading import load_class
from strop.utils.user_files import load_user_file


class VerifiersEnvironment:
    """One task of a taskset per episode, chosen by the seed."""

    def __init__(
        self,
        taskset: str,
        *,
        config: Mapping[str, Any] | None = None,
        index: int | None = None,
        limit: int = 10_000,
    ) -> None:
        """Args:
        taskset: FILE.py:CLASS, the dotted path of a class, or the id of an installed taskset.
        config: settings of the taskset.
        index: of the task; None: by the seed.
        limit: tasks that are read of the taskset.

        Raises:
            ValueError: there is no such taskset, or its tasks cannot be played here.
        """
        self._tasks = tasks_of(taskset, _frozen(config or {}), limit)
        self._index = index
        self._task: Any = None

    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """As of Environment."""
        index = seed % len(self._tasks) if self._index is None else self._index
        if not 0 <= index < len(self._tasks):
            raise ValueError(f"the taskset has {len(self._tasks)} tasks, but index is {index}")
        self._task = self._tasks[index]
        return Observation(messages=tuple(_prompt_messages(self._task.data)))

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """As of Environment: the episode ends with the first answer."""
        trace = _trace(self._task, action)
        await self._task.score(trace)
        facts = {
            **{name: value for name, value in trace.metrics.items() if value is not None},
            **{name: reward.value for name, reward in trace.rewards.items() if reward is not None},
        }
        return "", float(trace.reward), True, facts

    def gold_action(self) -> str | None:
        """The task's answer, where it is called so."""
        answer = getattr(self._task.data, "answer", None)
        return None if answer is None else str(answer)


@functools.cache  # a taskset may read a whole data set
def tasks_of(name: str, config: tuple[tuple[str, Any], ...], limit: int) -> list[Any]:
    """The tasks of a taskset.

    Raises:
        ValueError: there is no such taskset, or its tasks cannot be played here.
    """
    try:
        import verifiers.v1 as vf
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import taskset_class
    except ModuleNotFoundError as error:
        try:
            requirement = f"verifiers 0.4 or newer, and {metadata.version('verifiers')} is installed"
        except metadata.PackageNotFoundError:
            requirement = f"the verifiers package ({error})"
        raise ValueError(
            f"environment verifiers needs {requirement}: pip install 'strop[verifiers]'"
        ) from error
    file, colon, class_name = name.rpartition(":")
    if colon and file.endswith(".py"):
        taskset = getattr(load_user_file(file, setting="environment verifiers"), class_name, None)
    elif "." in name:
        taskset = load_class(name, setting="environment verifiers")
    else:
        try:
            taskset = taskset_class(name)
        except (ImportError, ValueError, TypeError) as error:
            raise ValueError(f"verifiers has no taskset {name!r}: {error}") from error
    if not isinstance(taskset, type) or not issubclass(taskset, vf.Taskset):
        raise ValueError(f"{name!r} is no taskset of verifiers (a subclass of verifiers.v1.Taskset)")
    settings = (concrete_type(taskset, vf.TasksetConfig) or vf.TasksetConfig)(**dict(config))
    tasks = list(itertools.islice(iter(taskset(settings)), limit))
    if not tasks:
        raise ValueError(f"the taskset {name!r} has no tasks")
    kind = type(tasks[0])
    needs = [
        need
        for need, is_so in {
            "a container": kind.NEEDS_CONTAINER,
            "tool servers": bool(kind.toolsets(tasks[0].config)),
            "a method setup": kind.setup is not vf.Task.setup,
            "a method finalize": kind.finalize is not vf.Task.finalize,
        }.items()
        if is_so
    ]
    if needs:
        raise ValueError(
            f"tasks of {name!r} have {' and '.join(needs)}, which needs the package's own runtime; only tasks with a "
            f"prompt and rewards can be played here"
        )
    return tasks


def _frozen(config: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(config.items()))


def _prompt_messages(data: Any) -> list[dict[str, Any]]:
    """The conversation that a task begins with."""
    messages: list[dict[str, Any]] = []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [message.model_dump(exclude_none=True) for message in data.prompt or ()]
    return messages


def _trace(task: Any, answer: str) -> Any:
    """The record of the conversation in the form that rewards read."""
    import verifiers.v1 as vf

    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    messages = [kinds[message["role"]](**message) for message in _prompt_messages(task.data)]
    nodes = [
        vf.MessageNode(parent=number - 1 if number else None, message=message, sampled=False)
        for number, message in enumerate(messages)
    ]
    answer_message = vf.AssistantMessage(content=answer)
    nodes.append(
        vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=answer_message, sampled=True)
    )
    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        is_completed=True,
        ok=True,
        stop_condition="agent_completed",
    )
