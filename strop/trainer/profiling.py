"""Profiled steps: the timeline over all processes, and the traces that each of them writes.

Concurrency: the controller asks the workers before the step and after it, when they have nothing else to do. Only an
engine that answers between calls goes on meanwhile; its samples are in the timeline, as far as they end in the step.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

from strop.controller import WorkerGroup, WorkerLost
from strop.controller.call import Pending, WorkerCall
from strop.run.folder import PROFILED, RunFolder
from strop.run.profile.parts import Clock, clock_of, join_parts, missing_parts, step_folder, write_part
from strop.trainer.callbacks import Reporter
from strop.trainer.sections import TrainerConfig
from strop.utils import process_profiler, timeline
from strop.utils.timeline import CONTROLLER

_ASKED = 3
"""Questions for the time of a process; the quickest answer counts."""

Groups = Sequence[WorkerGroup[Any]]
"""Worker groups of all roles."""


class StepProfiler:
    """Profiler of the steps that trainer.profile_steps names."""

    def __init__(self, settings: TrainerConfig, run: RunFolder, *, say: Reporter) -> None:
        """Args:
        settings: its profile_steps and profile_memory.
        run: its folder.
        say: prints where the files are.
        """
        self._steps, self._memory = frozenset(settings.profile_steps), settings.profile_memory
        self._run, self._say = run, say

    def note_last(self, last_step: int) -> None:
        """Say which of the steps the run does not have."""
        if late := sorted(step for step in self._steps if step > last_step):
            self._say(
                f"WARNING: trainer.profile_steps names {', '.join(map(str, late))}, but the last step is {last_step}"
            )

    @contextlib.contextmanager
    def step(self, step: int, groups: Groups) -> Iterator[None]:
        """Context of a step; profiled where the settings name it."""
        if step not in self._steps:
            yield
            return
        folder = step_folder(self._run.path, step).absolute()
        if folder.exists():  # of a start that was taken back
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        clocks = _clocks(groups)
        try:
            timeline.start()
            labels = {label for label in _ask_all(groups, "start_profile", memory=self._memory) if label}
            with timeline.span(f"step {step}", "step"):
                yield
        except BaseException:
            process_profiler.drop()
            raise
        end = time.perf_counter()
        spans = timeline.stop()
        (whole,) = [span for span in spans if span.category == "step"]
        _ask_all(groups, "stop_profile", folder)
        write_part(folder, CONTROLLER.role, spans)
        if missing := missing_parts(folder, labels):
            self._say(
                f"WARNING: the timeline of step {step} lacks {', '.join(missing)}: their processes write to a {folder} "
                f"of their own machine, or are lost. Put the run folder where all machines see it"
            )
        join_parts(folder, step=step, start_s=whole.start_s, end_s=whole.end_s, clocks=clocks)
        self._run.events.append(PROFILED, step, seconds=time.perf_counter() - end)
        self._say(f"step {step}: profile in {folder}")


def _ask_all(groups: Groups, method: str, *args: Any, **kwargs: Any) -> list[Any]:
    """Call a method of every worker, all at once; the results of those that are not lost meanwhile."""
    pending: list[Pending[Any]] = []
    for group in groups:
        pending += group.execute_all_async(method, *args, **kwargs)
    results = []
    for call in pending:
        with contextlib.suppress(WorkerLost):  # its group replaces it
            results.append(call.result())
    return results


def _clocks(groups: Groups) -> dict[str, Clock]:
    """Clock of every process, by the label of each worker in it; each is asked alone."""
    clocks: dict[str, Clock] = {}
    for group in groups:
        for rank in range(group.world_size):
            for _ in range(_ASKED):
                asked_s = time.perf_counter()
                with contextlib.suppress(WorkerLost):
                    call = WorkerCall(rank=rank, method="profile_clock", args=(), kwargs={})
                    (label, told_s) = group.submit([call])[0].result()
                    clock = clock_of(asked_s, told_s, time.perf_counter())
                    clocks[label] = min(clocks.get(label, clock), clock, key=lambda c: c.error_s)
    return clocks
