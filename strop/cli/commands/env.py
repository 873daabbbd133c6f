"""`strop env check`: what can be said of an environment without a model, and a certificate of it.

Exit codes: 0 nothing is wrong; 1 something would spoil a training, each thing told in a sentence.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from strop.cli.settings import user_path
from strop.utils.safe_read import check_regular, lines_of, open_regular, parse_yaml
from strop.utils.terminal import UsageError, check_writable, plain, print_json, print_plain, say

if TYPE_CHECKING:
    from strop.agents.envs.certificate import EnvironmentReport

SUMMARY = "check an environment for training, without a model"
EPILOG = """\
examples:
  strop env check examples/multi_turn_env/env.py:GuessNumber
  strop env check reasoning_gym task=chain_sum --seeds 20
  strop env check gymnasium id=Blackjack-v1 'actions={hit: 1, stick: 0}'
  strop env check my_env.py:Shop --rows train.jsonl --out certificate.json

Scripted players play it: its own best actions (gold_action), silence, noise, and answers made to break things. The
same seed must give the same episode, also while others are played at the same time, and no answer may make it fail.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("action", choices=["check"], help="the action")
    parser.add_argument("name", help="environment: a name, FILE.py:CLASS, or the dotted path of a class")
    parser.add_argument(
        "kwargs", nargs="*", metavar="key=value", help="arguments of the environment, as YAML"
    )
    parser.add_argument("--files", nargs="*", default=[], help="Python files that register environments")
    parser.add_argument("--rows", type=user_path, help="data whose rows the episodes get: .jsonl or .parquet")
    parser.add_argument("--seeds", type=int, default=8, help="episodes of each player (default: 8)")
    parser.add_argument("--at-once", type=int, default=8, help="episodes at the same time (default: 8)")
    parser.add_argument("--max-turns", type=int, default=32, help="turns of an episode (default: 32)")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for one call (default: 10)")
    parser.add_argument("--out", type=user_path, help="file for the certificate, JSON")
    parser.add_argument("--json", action="store_true", help="print the certificate as JSON")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    from strop.agents.envs.certificate import Inspection
    from strop.agents.envs.loading import EnvironmentChoice, find_environment
    from strop.utils.user_files import load_user_file

    for option in ("seeds", "at_once", "max_turns", "timeout"):
        if getattr(args, option) <= 0:
            raise UsageError(f"--{option.replace('_', '-')} is {getattr(args, option)}; use more than 0")
    if args.out:
        check_writable(args.out)
    for name in args.files:
        load_user_file(name, setting="--files")
    find_environment(args.name)
    choice = EnvironmentChoice(name=args.name, kwargs=_kwargs(args.kwargs))
    choice.make()  # a constructor that cannot be called is told as a mistake of the command line
    inspection = Inspection(
        choice,
        rows=_rows(args.rows, args.seeds) if args.rows else [],
        num_seeds=args.seeds,
        num_at_once=args.at_once,
        max_turns=args.max_turns,
        timeout_s=args.timeout,
    )
    certificate = asyncio.run(inspection.run())
    if args.out:
        args.out.write_text(json.dumps(certificate.as_json(), indent=2) + "\n", encoding="utf-8")
    if args.json:
        print_json(certificate.as_json())
    else:
        _show(certificate)
        if args.out:
            say(f"certificate: {args.out}")
    return 1 if certificate.faults else 0


def _kwargs(words: Sequence[str]) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"{word!r} is no argument of an environment; write key=value")
        try:
            kwargs[key] = parse_yaml(value)
        except (yaml.YAMLError, ValueError) as error:
            raise UsageError(f"the value of {key} is no YAML: {error}") from None
    return kwargs


def _rows(path: Path, count: int) -> list[Mapping[str, Any]]:
    """The first rows of a file, as an environment gets them."""
    from strop.data.json_rows import parse_object

    if path.suffix == ".parquet":
        import pyarrow.parquet

        check_regular(path)
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = next(file.iter_batches(count)).to_pylist() if file.metadata.num_rows else []
    elif path.suffix == ".jsonl":
        with open_regular(path) as file:
            lines = zip(range(count), lines_of(file, path), strict=False)
            rows = [
                parse_object(line.decode("utf-8"), f"line {number + 1} of {path}") for number, line in lines
            ]
    else:
        raise UsageError(f"--rows names {path}; use a .jsonl or .parquet file")
    return [
        {**row, "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
         "extra_info": row.get("extra_info") or {}}
        for row in rows
    ]  # fmt: skip


def _show(certificate: EnvironmentReport) -> None:
    def mark(holds: bool) -> str:
        return "ok" if holds else "NO"

    scores = ", ".join(f"{kind} {score:.3g}" for kind, score in certificate.mean_scores.items())
    low, high = certificate.reward_range
    for label, text in {
        "same seed, same episode": mark(certificate.is_deterministic),
        "other seeds differ": mark(certificate.seeds_differ),
        "episodes at once": mark(certificate.is_isolated),
        "rewards": f"{low:g} to {high:g} per step",
        "mean score": scores,
        "longest episode": f"{certificate.max_turns} turns",
        "cost": f"{1000 * certificate.mean_episode_s:.1f} ms per episode, {certificate.memory_mib:.1f} MiB in all",
    }.items():
        print_plain(f"{label:<24} {text}")
    for note in certificate.notes:
        print_plain(f"note: {plain(note, is_one_line=True)}")
    for fault in certificate.faults:
        print_plain(f"FAULT: {plain(fault, is_one_line=True)}")
    verdict = f"{len(certificate.faults)} faults" if certificate.faults else "nothing is wrong"
    print_plain(f"{certificate.environment}: {verdict}, {certificate.episodes} episodes")
