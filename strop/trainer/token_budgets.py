"""Token budgets of roles that were lowered because memory ran out: reported, recorded, and held by continuations.

A role lowers its budget by itself where one process has its model (engines/token_budget.py). Where several do, the run
begins again from its last checkpoint with the budget that the error names (fault_tolerance/healing.py). Both are events
of the run, so that a continuation cuts its batches as the run did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.controller import WorkerFailed, WorkerGroup, as_list
from strop.engines.config import EngineConfig
from strop.engines.token_budget import SMALLER, TOKENS, OutOfMemory
from strop.run import RunFolder
from strop.run.folder import OUT_OF_MEMORY as EVENT
from strop.trainer.callbacks import Reporter
from strop.trainer.config import Config
from strop.trainer.sections import RoleName
from strop.utils.metrics import Metric
from strop.workers.models import ModelWorker

OUT_OF_MEMORY = Metric(
    "perf/out_of_memory",
    "times",
    "that passes of the step ran out of memory, and were made again with fewer tokens in a micro-batch; of all roles",
)


def report_halvings(
    groups: Mapping[RoleName, WorkerGroup[ModelWorker]],
    settings: Mapping[str, tuple[str, EngineConfig]],
    run: RunFolder,
    step: int,
    say: Reporter,
) -> dict[str, float]:
    """Report and record how roles have lowered their budgets since the last call; OUT_OF_MEMORY.

    Args:
        groups: of the roles with a model, by name.
        settings: of each, the key of the engine's section, such as actor.engine, and the section.
        run, step, say: where it happened, and who hears of it.
    """
    num_times = 0
    for role, group in groups.items():
        key, engine = settings[role]
        for halvings in as_list(group.call.take_halvings()):
            if not halvings:
                continue
            num_times += len(halvings)
            first, last = halvings[0], halvings[-1]
            record_budget(run, step, role, engine, last.after, tokens=first.tokens, reason=first.reason)
            say(
                f"WARNING: step {step}: memory ran out {first.place} ({first.reason}); the passes "
                f"were made again with at most {last.after}, and the run goes on so; to begin the next one with "
                f"it, set {key}.max_tokens_per_device={last.after}"
            )
    return {OUT_OF_MEMORY: float(num_times)}


def record_budget(
    run: RunFolder, step: int, role: str, engine: EngineConfig, held: int, **facts: object
) -> None:
    """Record the budget that a role has from now on."""
    setting = engine.max_tokens_per_device
    run.events.append(EVENT, step, fsync=True, role=role, setting=setting, held=held, **facts)


def recorded_budgets(run: RunFolder, engines: Mapping[str, EngineConfig]) -> dict[str, int]:
    """Budgets that were lowered, by role; those of roles whose setting was changed since are not among them."""
    events: list[dict[str, Any]] = run.events.read(EVENT)
    return {
        event["role"]: event["held"]
        for event in events
        if event["role"] in engines and event["setting"] == engines[event["role"]].max_tokens_per_device
    }


def hold_budgets(
    groups: Mapping[RoleName, WorkerGroup[ModelWorker]], engines: Mapping[str, EngineConfig], run: RunFolder
) -> None:
    """Give roles that were just made the budgets that earlier starts of the run came to."""
    recorded = recorded_budgets(run, engines)
    for role, group in groups.items():
        if role in recorded:
            group.call.hold_budget(recorded[role])


def smaller_budget(config: Config, error: WorkerFailed) -> tuple[str, int, int | None] | None:
    """The role of several processes that has run out of memory, the budget that cuts what failed, and its tokens on the
    rank that was heard first, if it was packed; None where the error is another one, or a row alone is too much."""
    name = f"{OutOfMemory.__module__}.{OutOfMemory.__qualname__}"
    if error.exception_type != name or error.role not in config.used_engines or SMALLER not in error.facts:
        return None
    return error.role, error.facts[SMALLER], error.facts.get(TOKENS)
