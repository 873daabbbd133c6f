"""`strop check`: can a run learn, and does a loss or an estimator keep the rules that training relies on?

Exit codes: 0 a run would start, a function keeps every rule; 1 not, with a sentence for each reason.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from strop.cli.settings import add_trust_argument, load_settings
from strop.cli.unused_keys import Reads, refuse_unread
from strop.trainer.sections import FINE_TUNING_SECTIONS
from strop.utils.quiet_libraries import quiet_models
from strop.utils.terminal import UsageError, plain, print_json, print_plain

SUMMARY = (
    "play a run's first prompts and report whether it can learn; or test a loss or an estimator of your own"
)
EPILOG = """\
examples:
  strop check --config config.yaml
  strop check --config config.yaml rollout.samples_per_prompt=16 --prompts 40
  strop check loss mine.py:my_loss
  strop check loss mine.py:my_loss delta=0.3
  strop check estimator mine.py:my_advantages
  strop check loss gspo clip_low=0.03 clip_high=0.04
  strop check estimator grpo --json

NAME is the name a function is registered under, or the function's own. key=value are its settings, as in
algorithm.loss_settings and algorithm.adv_settings.

A configuration is checked with samples: the prompts of its first step are played and scored as in the run, nothing is
trained, and ten answers are shown with what the scorer made of them. `strop train` does the same on fewer prompts
before its first step. FAIL: the run would not start; warn: it would, but look at it.
"""

KINDS = ("loss", "estimator")
READS = Reads(
    keys=("",),
    but=(
        "trainer.trackers", "trainer.project_name", "trainer.experiment_name", "trainer.skip_rollout",
        "trainer.critic_warmup", "trainer.preflight", "trainer.rehearse_longest_batch", "eval", "run",
        *FINE_TUNING_SECTIONS,
    ),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "what",
        nargs="?",
        metavar="loss|estimator",
        help="kind of function; CONFIG.yaml is the same as --config CONFIG.yaml",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILE.py:NAME|key=value",
        help="the function: in a file, or a name that comes with strop; then settings, of the function or the run",
    )
    parser.add_argument("--config", metavar="FILE", help="a run's configuration, or the name of a preset")
    parser.add_argument(
        "--prompts", type=int, default=24, metavar="N", help="prompts to try of a run (default: 24)"
    )
    add_trust_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(overrides=[])


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    words = [args.what, *args.words] if args.what is not None else []
    if args.config is not None:
        return _check_run(args, words)
    if args.what is None:
        raise UsageError(
            f"name what to check: --config FILE, {' or '.join(f'{k} FILE.py:NAME' for k in KINDS)}"
        )
    if args.what not in KINDS and Path(args.what).suffix in (".yaml", ".yml"):
        args.config = args.what
        return _check_run(args, args.words)
    if args.what not in KINDS:
        near = difflib.get_close_matches(args.what, KINDS, n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"there are {' and '.join(KINDS)}, and --config FILE for a run"
        )
        raise UsageError(f"`strop check` does not know {args.what!r}; {hint}")
    if not args.words:
        raise UsageError(
            f"`strop check {args.what}` needs a function: FILE.py:NAME, or a name that comes with strop"
        )
    name, *settings = args.words
    from strop.cli.check_functions.named import check_estimator, check_loss

    findings = {"loss": check_loss, "estimator": check_estimator}[args.what](name, settings)
    if args.json:
        print_json(
            {
                "kind": args.what,
                "name": name,
                "passed": not findings,
                "findings": [asdict(finding) for finding in findings],
            }
        )
    else:
        for finding in findings:
            print_plain(plain(f"{finding.rule}: {finding.sentence}", is_one_line=True))
        num = len(findings)
        broken = f"breaks {num} rule{'s' if num > 1 else ''}"
        print_plain(plain(f"{args.what} {name} {broken if num else 'keeps every rule'}", is_one_line=True))
    return 1 if findings else 0


def _check_run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Samples of a run's first prompts."""
    if args.prompts < 1:
        raise UsageError(f"--prompts is {args.prompts}; at least 1 must be tried")
    args.overrides = list(overrides)
    config = load_settings(args)
    refuse_unread(args, "check", READS)
    from strop.trainer.named_files import check_named_files

    check_named_files(config, "check")
    quiet_models()
    from strop.trainer.preflight.trial import run_preflight

    report = run_preflight(config, num_prompts=args.prompts)
    if args.json:
        print_json(
            {
                "kind": "run",
                "name": args.config,
                "passed": not report.obstacles,
                "seconds": report.seconds,
                "num_prompts": report.num_prompts,
                "num_samples": report.num_samples,
                "checks": [asdict(check) for check in report.checks],
                "samples": report.samples,
            }
        )
        return 1 if report.obstacles else 0
    for line in report.lines():
        print_plain(plain(line, is_one_line=True))
    return 1 if report.obstacles else 0
