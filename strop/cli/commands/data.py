"""`strop data`: checks of data files, prepared data sets, and the cache.

Exit codes: 0 a run would take the files; 2 it would refuse them, with every reason, or they cannot be read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from strop.cli.commands import data_check, data_index, data_prepare
from strop.cli.settings import add_trust_argument, is_setting, load_settings
from strop.cli.unused_keys import Reads, refuse_unread
from strop.data.cache import cache_folder, entries, remove
from strop.utils.terminal import UsageError, plain, print_json, print_plain

SUMMARY = "check data files; prepare well-known data sets"
READS = Reads(keys=("data.cache_dir", "data.cache_max_bytes"))
EPILOG = """\
examples:
  strop data check train.parquet --model models/smollm2
  strop data check train.jsonl --val val.jsonl --model models/smollm2 data.ground_truth_key=answer
  strop data check --config examples/arithmetic/config.yaml
  strop data prepare gsm8k hub:openai/gsm8k:main@train --out data/gsm8k/train.parquet
  strop data prepare math downloads/MATH@test --out data/math/test.parquet
  strop data cache
  strop data cache --clear data.cache_dir=/scratch/cache

check reads all rows the way `strop train` would, and lists everything that is wrong with them, not only the first
thing. Without FILE it takes data.train_files and data.val_files of the configuration.

prepare NAME SRC --out OUT turns the raw rows of a well-known data set into rows for training. NAME is gsm8k, math,
math500, aime24, aime25, geo3k, dapo_math or countdown; SRC is a file, a folder (FOLDER@split), a data set of the hub or
a URL; OUT ends in .parquet or .jsonl, and its name without that is the split.

cache lists what data.cache_dir keeps, last used first: fetched files, token ids of large sets, and indexes of streamed
files. --clear removes all of it; a run that is about to start may need it made again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    width = max(map(len, ACTIONS))
    listed = "\n".join(f"  {name:<{width}}  {action.summary}" for name, action in ACTIONS.items())
    parser.description = f"{parser.description}\n\nactions:\n{listed}"
    parser.epilog = EPILOG
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help="one of the actions above")
    parser.add_argument(
        "words", nargs="*", default=[], metavar="WORD", help="arguments of the action; settings are key=value"
    )
    parser.add_argument("--model", metavar="MODEL", help="check: whose tokenizer and chat template count")
    parser.add_argument(
        "--val", action="append", default=[], metavar="FILE", help="check: validation file; may be repeated"
    )
    parser.add_argument("--config", metavar="FILE", help="check, cache: YAML file with settings")
    add_trust_argument(parser)
    parser.add_argument(
        "--with-tool", action="store_true", help="prepare gsm8k: rows for an agent with a tool"
    )
    parser.add_argument("--clear", action="store_true", help="cache: remove the entries")
    parser.add_argument("-o", "--out", metavar="FILE", help="prepare, index: the file to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    action = ACTIONS[args.action]
    for option in ("model", "val", "config", "with_tool", "clear", "out"):
        if getattr(args, option) and option not in action.options:
            owners = " and ".join(name for name, candidate in ACTIONS.items() if option in candidate.options)
            raise UsageError(f"--{option.replace('_', '-')} belongs to {owners}")
    args.overrides = [word for word in args.words if is_setting(word)]
    args.words = [word for word in args.words if not is_setting(word)]
    return action.carry_out(args)


def _cache(args: argparse.Namespace) -> int:
    if args.words:
        raise UsageError("cache takes settings such as data.cache_dir=DIR, and --config, --clear and --json")
    config = load_settings(args, needs=("data.cache_dir",))
    refuse_unread(args, "data cache", READS)
    folder = cache_folder(config.data.cache_dir)
    cached = entries(folder)
    total = sum(entry.num_bytes for entry in cached)
    if args.clear:
        remove(cached)
    if args.json:
        rows = [
            {"path": str(entry.path), "bytes": entry.num_bytes, "used_at": entry.used_at} for entry in cached
        ]
        print_json({"folder": str(folder), "bytes": total, "entries": rows, "cleared": args.clear})
        return 0
    for entry in cached if not args.clear else []:
        used = datetime.fromtimestamp(entry.used_at, UTC).strftime("%Y-%m-%d %H:%M")
        name = plain(str(entry.path.relative_to(folder)))
        print_plain(f"{entry.num_bytes / 2**20:10.1f} MiB  last used {used} UTC  {name}")
    verb = "removed from" if args.clear else "in"
    limit = config.data.cache_max_bytes / 2**20
    size = f"{len(cached)} {'entry' if len(cached) == 1 else 'entries'} of {total / 2**20:.1f} MiB"
    print_plain(f"{size} {verb} {plain(str(folder))}; a run keeps at most {limit:.0f} MiB")
    return 0


@dataclass(frozen=True, kw_only=True)
class Action:
    """An action of `strop data`."""

    summary: str
    """One line for --help."""
    carry_out: Callable[[argparse.Namespace], int]
    options: tuple[str, ...]
    """Options of this action alone."""


ACTIONS = {
    "check": Action(summary=data_check.SUMMARY, carry_out=data_check.run, options=data_check.OPTIONS),
    "prepare": Action(summary=data_prepare.SUMMARY, carry_out=data_prepare.run, options=data_prepare.OPTIONS),
    "index": Action(summary=data_index.SUMMARY, carry_out=data_index.run, options=data_index.OPTIONS),
    "cache": Action(
        summary="cached files, rows and token ids; --clear removes them",
        carry_out=_cache,
        options=("config", "clear"),
    ),
}
"""By name, in the order of --help."""
