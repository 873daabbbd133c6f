"""verl's profiling as trainer.profile_steps: `global_profiler` (2026), trainer.profile_steps (2025) and the interval of
fine-tuning. Steps count from 1 in both."""

from __future__ import annotations

from typing import Any

from strop.compat.migrate.result import Facts, Outcome, UnreadableError, integer, lack, many, skip

_STEPS, _TOOL = "global_profiler.steps", "global_profiler.tool"
_RANGES = {
    "nsys": "start the command under `nsys profile`: roles, calls and passes of these steps are NVTX ranges there",
    "npu": "start the command under `msprof`: roles, calls and passes of these steps are MSTX ranges there",
}


def profiled_steps(key: str, value: Any, facts: Facts) -> Outcome:
    """Steps that are profiled; those of global_profiler where it has a tool."""
    if not value:
        return skip("not set")
    if key == _STEPS and not facts.get(_TOOL):
        return skip(f"read where {_TOOL} is set")
    if not (steps := _numbers(value)):
        return skip("no step has such a number: steps count from 1")
    return many({"trainer.profile_steps": steps}, "each with its timeline and the traces of torch")


def _numbers(value: Any) -> list[int]:
    """Steps of a setting, those that a run has: from 1 on."""
    entries = value if isinstance(value, list | tuple) else [value]
    return sorted({step for entry in entries if (step := integer(entry)) > 0})


def profile_tool(key: str, value: Any, facts: Facts) -> Outcome:
    """The tool of the profiled steps: torch's trace is always written, the memory's history on request."""
    if not value:
        return skip("not set")
    steps = facts.get(_STEPS)
    if not steps or not _numbers(steps):
        return skip(f"read with {_STEPS}")
    if value == "torch":
        return many({}, f"with {_STEPS}")
    if value == "torch_memory":
        return many({"trainer.profile_memory": True}, "on CUDA; beside the traces of torch")
    if value in _RANGES:
        return many({}, _RANGES[value])
    return lack("a profiled step has torch's trace, CUDA's memory history, and ranges for nsys and msprof")


def profile_interval(key: str, value: Any, facts: Facts) -> Outcome:
    """First and last step that are profiled in fine-tuning; negative ones are none."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise UnreadableError(f"{value!r} would have to be the first and the last step")
    first, last = map(integer, value)
    if last < 1:
        return skip("not set")
    return many({"trainer.profile_steps": list(range(max(first, 1), last + 1))})
