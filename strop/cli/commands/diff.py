"""`strop diff`: whether two runs did the same, and where they part if not."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from strop.cli.settings import user_path
from strop.observability.viewer.diff import SampleDifference, compared
from strop.run import RunFolder
from strop.run.first_difference import Difference
from strop.run.replay_schedule import ScheduleDifference
from strop.utils.terminal import print_json, print_plain

SUMMARY = "find the first step and stage in which two runs differ"
EPILOG = """\
examples:
  strop diff runs/first runs/second
  strop diff runs/first runs/second --json

Exit code 0: equal to the bit over all steps that both runs have. 1: they differ; the first step and stage is
named. The stages of a step, in order: data, prompt_tokens, sampled_tokens, log_probs, rewards, advantages, loss,
weights. Of runs whose generation was ahead of training it is also said whether their schedules (what ended in which
order, which weights sampled which tokens) part before, or the numbers do.
"""
_MAX_SETTINGS = 6
"""Settings that differ and are shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("run_a", metavar="RUN_A", type=user_path, help="run folder")
    parser.add_argument("run_b", metavar="RUN_B", type=user_path, help="run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    with RunFolder.open(args.run_a, read_only=True) as a, RunFolder.open(args.run_b, read_only=True) as b:
        result = compared(a, b)
    if args.json:
        print_json(result.as_json())
    elif result.difference is None:
        rest = (
            f"; the longer run has {result.num_steps} steps" if result.num_steps > len(result.steps) else ""
        )
        print_plain(
            f"equal over {len(result.steps)} common steps ({result.steps[0]} to {result.steps[-1]}){rest}"
        )
    else:
        _show(result.difference, result.sample, result.settings)
        if result.has_schedules:
            print_plain(_cause_in_words(result.schedule))
    return 0 if result.difference is None else 1


def _show(difference: Difference, sample: SampleDifference | None, settings: Mapping[str, list[Any]]) -> None:
    equal = difference.num_equal_steps
    before = f"{equal} common step{'s' if equal != 1 else ''} before it {'is' if equal == 1 else 'are'} equal"
    print_plain(
        f"step {difference.step} differs first in {difference.stage}; {before if equal else 'no step is equal'}"
    )
    if sample is not None:
        print_plain(f"first sample: {sample.id}: {sample.text}")
    if settings:
        shown = [
            f"{key}: {left} and {right}" for key, (left, right) in list(settings.items())[:_MAX_SETTINGS]
        ]
        more = len(settings) - len(shown)
        print_plain(f"settings that differ: {'; '.join(shown)}{f'; and {more} more' if more else ''}")


def _cause_in_words(schedule: ScheduleDifference | None) -> str:
    if schedule is None:
        return "their schedules are the same until then: the difference is one of numbers"
    return (
        f"their schedules part in step {schedule.step}, which {schedule.text}: runs ahead of training are made again "
        f"with `strop replay`, not with their seed"
    )
