"""`strop plan`: whether a run fits, how long a step takes, and where to place it, before any weight is loaded.

Exit codes: 0 it fits; 1 it does not.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.settings import add_trust_argument, load_settings
from strop.cli.unused_keys import Reads, refuse_unread, unread_of_file
from strop.trainer.sections import FINE_TUNING_SECTIONS
from strop.utils.quiet_libraries import quiet_models
from strop.utils.shell_words import shell_word
from strop.utils.terminal import UsageError, plain, print_json, print_plain, say

if TYPE_CHECKING:
    from strop.trainer.plan.placement import Placement, Placements
    from strop.trainer.plan.plan import Plan

SUMMARY = "predict memory and time of a run from its settings and config.json, and suggest a placement"
EPILOG = """\
examples:
  strop plan config.yaml
  strop plan config.yaml --device h100 --devices 64
  strop plan config.yaml actor.engine.max_tokens_per_device=8192 --memory-gib 24
  strop plan config.yaml --response-tokens 900 --json

Of each model only config.json is read: no weight is loaded or fetched, and the device that is named need not be here.
Memory is that of answers which all reach data.max_response_tokens; time is that of answers of --response-tokens on
average.

Exit code 0: it fits; 1: it does not, and the smallest change with which it does is printed.
"""
READS = Reads(
    keys=("",),
    but=(
        "eval",
        "trainer.trackers",
        "trainer.project_name",
        "trainer.experiment_name",
        *FINE_TUNING_SECTIONS,
    ),
)
MODELS = ("model.path", "reference.path", "teacher.path", "critic.path", "prm.path", "reward_model.path")
"""Of these config.json is read; tokenizers and adapters are not."""
GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG|key=value",
        help="a run's configuration, or the name of a preset; then settings on top of it",
    )
    parser.add_argument("--config", metavar="FILE", help="the same as CONFIG")
    parser.add_argument(
        "--device", default="", metavar="NAME", help="h100, a100, ..., or cpu (default: that of this machine)"
    )
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="memory of a device, if not its own")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="search for a placement on up to so many devices"
    )
    parser.add_argument(
        "--response-tokens",
        type=float,
        metavar="MEAN",
        help="tokens of an answer on average (default: half of data.max_response_tokens)",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="tokens of a prompt (default: data.max_prompt_tokens)"
    )
    add_trust_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(overrides=[])


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    words = list(args.words)
    if words and "=" not in words[0]:
        if args.config is not None:
            raise UsageError(f"{words[0]} and --config {args.config} both name a configuration; give one")
        args.config = words.pop(0)
    args.overrides = words
    _check_numbers(args)
    config = load_settings(args, needs=("model", "algorithm"))
    if not config.data.train_files:
        _refuse_fine_tuning(args.config)
    refuse_unread(args, "plan", READS)
    quiet_models()
    from strop.trainer.model_locations import locate
    from strop.trainer.plan.placement import search
    from strop.trainer.plan.plan import make_plan
    from strop.utils.device import device_name

    if args.devices is not None and (args.device or device_name(config.resources.device)) == "cpu":
        raise UsageError(
            f"--devices is {args.devices}, but processes on a CPU share its cores and memory, so that there is nothing "
            f"to place; name the devices of the run with --device"
        )

    config = locate(config, say=say, weights=False, keys=MODELS).config
    plan = make_plan(
        config,
        device=args.device,
        memory_gib=args.memory_gib,
        mean_response_tokens=args.response_tokens,
        prompt_tokens=args.prompt_tokens,
    )
    placements = None
    if args.devices is not None:
        available = plan.memory_bytes - plan.baseline_bytes
        placements = search(config, plan.roles, plan.device, devices=args.devices, available=available)
    if args.json:
        print_json(_record(plan, placements))
    else:
        for line in _lines(plan, placements):
            print_plain(plain(line, is_one_line=True))
    return 0 if plan.fits else 1


def _check_numbers(args: argparse.Namespace) -> None:
    for option in ("memory_gib", "devices", "response_tokens", "prompt_tokens"):
        value = getattr(args, option)
        if value is not None and not 0 < value < math.inf:  # nan is neither
            raise UsageError(f"--{option.replace('_', '-')} is {value:g}; give a finite number above 0")
    names_file = args.config is not None and Path(args.config).suffix in (".yaml", ".yml")
    if names_file and not Path(args.config).is_file():
        raise UsageError(f"{args.config} is no file; give the configuration of a run")


def _refuse_fine_tuning(source: str | None) -> None:
    """Raise a UsageError for a file with settings of a fine-tuning: the plan would be of a training by defaults."""
    sections = [] if source is None else sorted({*FINE_TUNING_SECTIONS} & {*unread_of_file(source, READS)})
    if sections:
        raise UsageError(
            f"{source} has settings of {' and '.join(sections)} and no data.train_files: a plan is one of `strop "
            f"train`; fine-tuning tries its longest batch before its first step, on a CPU with "
            f"trainer.rehearse_longest_batch=true"
        )


def _record(plan: Plan, placements: Placements | None) -> dict[str, Any]:
    """The plan as JSON."""
    return {
        "fits": plan.fits,
        "peak_bytes": plan.peak_bytes,
        "peak_phase": plan.peak_phase,
        "memory_bytes": int(plan.memory_bytes),
        "step_seconds": plan.step_seconds,
        "idle_share": plan.time.idle_share,
        "device_hours_per_step": plan.device_hours_per_step,
        "suggestion": _suggestion(plan, placements),
        "suggestion_step_seconds": _suggested_seconds(plan, placements),
        "baseline_bytes": plan.baseline_bytes,
        "load_host_bytes": int(plan.load_host_bytes),
        "phases": [
            {
                "phase": phase.phase,
                "device_bytes": phase.device_bytes,
                "device": {name: int(size) for name, size in phase.device.items()},
                "host_bytes": phase.host_bytes,
                "host": {name: int(size) for name, size in phase.host.items()},
            }
            for phase in plan.phases
        ],
        "stages": dict(plan.seconds_by_stage),
        "placements": None
        if placements is None
        else {
            "tried": placements.num_tried,
            "fitting": placements.num_fitting,
            "fastest": _placement(placements.fastest),
            "cheapest": _placement(placements.cheapest),
        },
        "assumptions": list(plan.assumptions),
    }


def _placement(placement: Placement | None) -> dict[str, Any] | None:
    if placement is None:
        return None
    return {
        "settings": list(placement.settings),
        "devices": placement.devices,
        "peak_bytes": placement.peak_bytes,
        "step_seconds": placement.time.step,
        "idle_share": placement.time.idle_share,
        "device_hours_per_step": placement.device_hours,
    }


def _suggestion(plan: Plan, placements: Placements | None) -> str:
    """Settings to give beside those that are there; empty where these are as good."""
    if placements is not None and placements.fastest is not None:
        return _words(placements.fastest.settings)
    if plan.fits or plan.change is None:
        return ""
    return _words(plan.change.settings)


def _suggested_seconds(plan: Plan, placements: Placements | None) -> float:
    """Seconds of a step with what is suggested."""
    if placements is not None and placements.fastest is not None:
        return placements.fastest.time.step
    return (plan.changed or plan).step_seconds


def _words(settings: Sequence[str]) -> str:
    """Settings as a shell takes them."""
    return " ".join(map(shell_word, settings))


def _lines(plan: Plan, placements: Placements | None) -> list[str]:
    """The plan as text."""
    models = [
        f"{role.name}: {_number(role.sizes.total)} parameters, {_number(role.sizes.trained)} trained, "
        f"{role.axes.world} rank{'s' if role.axes.world > 1 else ''}"
        for role in plan.roles
    ]
    lines = [*models, "memory of a rank, GiB:"]
    for phase in plan.phases:
        parts = ", ".join(
            f"{name} {size / GIB:.2f}" for name, size in phase.device.items() if size >= 0.005 * GIB
        )
        host = f"; on the host {phase.host_bytes / GIB:.2f}" if phase.host_bytes else ""
        in_brackets = f" ({parts})" if parts else ""
        lines.append(f"  {phase.phase}: {phase.device_bytes / GIB:.2f}{in_brackets}{host}")
    if plan.baseline_bytes:
        lines.append(f"  beside it, a process without a model: {plan.baseline_bytes / GIB:.2f}")
    lines.append(f"  host, while the model is loaded: {plan.load_host_bytes / GIB:.2f} in each process")
    verdict = "it fits" if plan.fits else "it does NOT fit"
    lines.append(
        f"most: {plan.peak_bytes / GIB:.2f} GiB in {plan.peak_phase}, of {plan.memory_bytes / GIB:.2f}: {verdict}"
    )
    if not plan.fits:
        lines.append(_change_line(plan))
    lines.append(_time_line(plan) if plan.changed is None else _time_line(plan.changed, " with it"))
    if placements is not None:
        lines += _placement_lines(placements)
    return [*lines, *(f"assumed: {line}" for line in plan.assumptions)]


def _time_line(plan: Plan, condition: str = "") -> str:
    stages = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in plan.seconds_by_stage.items())
    return (
        f"time of a step{condition}: {_seconds(plan.step_seconds)} s ({stages}); idle {plan.time.idle_share:.0%}; "
        f"{plan.device_hours_per_step:.3g} device-hours a step"
    )


def _seconds(seconds: float) -> str:
    """Three digits, or all before the point."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _number(parameters: float) -> str:
    """So many parameters, in billions, or in millions where they are few."""
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e8 else f"{parameters / 1e6:.3g} M"


def _change_line(plan: Plan) -> str:
    """The smallest change with which a run fits."""
    if plan.change is None:
        tried = "adapters" if plan.device.is_cpu else "offload, adapters or ranks"
        search = "" if plan.device.is_cpu else "; --devices N searches for a placement on up to N of them"
        return f"no change of budget, running sequences, checkpointing, {tried} makes it fit{search}"
    peak = (plan.change.peak_bytes + plan.baseline_bytes) / GIB
    return f"smallest change: {_words(plan.change.settings)} ({peak:.2f} GiB)"


def _placement_lines(placements: Placements) -> list[str]:
    head = f"placements: {placements.num_fitting} of {placements.num_tried} fit"
    if placements.fastest is None or placements.cheapest is None:
        return [f"{head}; use more devices, or adapters (model.lora.rank)"]
    lines = [head]
    for name, placement in (("fastest", placements.fastest), ("cheapest", placements.cheapest)):
        settings = _words(placement.settings)
        lines.append(
            f"  {name}: {placement.devices} devices, {_seconds(placement.time.step)} s a step, idle "
            f"{placement.time.idle_share:.0%}, {placement.device_hours:.3g} device-hours: {settings}"
        )
    return lines
