"""`strop data check`, `prepare` and `cache`: data files before a run, and what is kept of them.

Exit codes: 0 a run would take the files; 2 it would refuse them, with every reason, or they cannot be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.output import UsageError, plain, print_json, print_plain, say, shorten
from strop.cli.settings import add_trust_argument, load_settings

if TYPE_CHECKING:
    from strop.checks.data_files import DataReport
    from strop.trainer.config import Config

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
geo3k, dapo_math or countdown; SRC is a file, a folder (FOLDER@split), a data set of the hub or a URL; OUT ends in
.parquet or .jsonl, and its name without that is the split.

cache lists what data.cache_dir keeps, last used first: fetched files, token ids of large sets, and indexes of streamed
files. --clear removes all of it; a run that is about to start may need it made again.
"""

_BAR_WIDTH = 40
_NUM_PAIRS = 5
_SETTING = re.compile(r"[+~]?[a-z_]+(\.[\w/-]+)+=|[a-z_]+=")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("action", choices=("check", "prepare", "cache", "index"), help="what to do")
    parser.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="FILE",
        help="check: files, and settings as key=value; prepare: NAME SRC; cache: settings; index: CORPUS",
    )
    parser.add_argument("--model", metavar="MODEL", help="check: whose tokenizer and chat template count")
    parser.add_argument(
        "--val", action="append", default=[], metavar="FILE", help="check: validation file; may be repeated"
    )
    parser.add_argument("--config", metavar="FILE", help="check: YAML file with settings")
    add_trust_argument(parser)
    parser.add_argument(
        "--with-tool", action="store_true", help="prepare gsm8k: rows for an agent with a tool"
    )
    parser.add_argument("--clear", action="store_true", help="cache: remove what is kept")
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="prepare: the rows to write; index: the search index to write"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    if args.clear and args.action != "cache":
        raise UsageError("--clear belongs to cache")
    if args.out and args.action not in ("prepare", "index"):
        raise UsageError("--out belongs to prepare and index")
    return {"prepare": _prepare, "check": _check, "cache": _cache, "index": _index}[args.action](args)


def _index(args: argparse.Namespace) -> int:
    if len(args.words) != 1 or not args.out or args.model or args.val or args.with_tool or args.config:
        raise UsageError(
            "index takes one corpus and --out FILE: strop data index corpus.jsonl --out index.sqlite"
        )
    from strop.tools.search_index import build_index

    count = build_index(Path(args.words[0]), Path(args.out))
    if args.json:
        print_json({"index": args.out, "passages": count})
    else:
        print_plain(f"{plain(args.out)}: {count} passages")
    return 0


def _cache(args: argparse.Namespace) -> int:
    others = [word for word in args.words if not _SETTING.match(word)]
    if others or args.model or args.val or args.with_tool:
        raise UsageError("cache takes settings such as data.cache_dir=DIR, and --config, --clear and --json")
    args.overrides = list(args.words)
    config = load_settings(args, needs=("data.cache_dir",))
    from strop.data.cache import cache_folder, entries, remove

    folder = cache_folder(config.data.cache_dir)
    found = entries(folder)
    total = sum(entry.num_bytes for entry in found)
    if args.clear:
        remove(found)
    if args.json:
        rows = [
            {"path": str(entry.path), "bytes": entry.num_bytes, "used_at": entry.used_at} for entry in found
        ]
        print_json({"folder": str(folder), "bytes": total, "entries": rows, "cleared": args.clear})
        return 0
    for entry in found if not args.clear else []:
        used = datetime.fromtimestamp(entry.used_at, UTC).strftime("%Y-%m-%d %H:%M")
        name = plain(str(entry.path.relative_to(folder)))
        print_plain(f"{entry.num_bytes / 2**20:10.1f} MiB  last used {used} UTC  {name}")
    what = "removed from" if args.clear else "in"
    limit = config.data.cache_max_bytes / 2**20
    size = f"{_count_entries(len(found))} of {total / 2**20:.1f} MiB"
    print_plain(f"{size} {what} {plain(str(folder))}; a run keeps at most {limit:.0f} MiB")
    return 0


def _count_entries(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"


def _prepare(args: argparse.Namespace) -> int:
    if args.model or args.val or args.config:
        raise UsageError("prepare takes NAME SRC --out OUT; --model, --val and --config belong to check")
    words = [*args.words, args.out] if args.out else args.words  # OUT may also be the third word
    if len(words) != 3:
        raise UsageError(f"prepare takes NAME SRC --out OUT, got {' '.join(words)}; see `strop data --help`")
    from strop.data.prepare import RECIPES, prepare_rows, write_rows
    from strop.data.readers import read_rows

    name, source, out = words[0], words[1], Path(words[2]).expanduser()
    if name not in RECIPES:
        raise UsageError(f"there is no recipe for {name!r}; known: {', '.join(RECIPES)}")
    prepared = prepare_rows(name, read_rows([source]), split=out.stem, with_tool=args.with_tool)
    write_rows(out, prepared.rows)
    if args.json:
        print_json({"out": str(out), "rows": len(prepared.rows), "repeated": prepared.num_repeated})
        return 0
    repeated = f"; {prepared.num_repeated} repeated prompts left out" if prepared.num_repeated else ""
    print_plain(f"{_count(len(prepared.rows), 'row')} written to {plain(str(out))}{repeated}")
    return 0


def _check(args: argparse.Namespace) -> int:
    if args.with_tool:
        raise UsageError("--with-tool belongs to prepare gsm8k")
    files = [word for word in args.words if not _SETTING.match(word)]
    args.overrides = [word for word in args.words if _SETTING.match(word)]
    config = load_settings(args, needs=("model", "data", "agent"))
    train = files or list(config.data.train_files)
    val = args.val or ([] if files else list(config.data.val_files))
    if not train:
        raise UsageError("name the files to check, or a configuration with data.train_files (--config FILE)")
    from strop.agents.rows import with_agents
    from strop.agents.setup import AgentSetup
    from strop.checks.data_files import examine, overlap
    from strop.data.splits import load_rows
    from strop.engines.model import load_tokenizer

    tokenizer = load_tokenizer(dataclasses.replace(config.model, path=_model_folder(args, config)))
    data = dataclasses.replace(config.data, train_files=tuple(train), val_files=tuple(val))
    rows = {"train": load_rows(data, "train", tokenizer, seed=config.trainer.seed)}
    if val:
        rows["val"] = load_rows(data, "val", tokenizer)
    setup = AgentSetup(config.agent, tokenizer, template_options=config.data.chat_template_kwargs)
    nameless = [line for split, found in rows.items() for line in _agent_problems(split, found)]
    shown = rows if nameless else {split: with_agents(found, setup, split) for split, found in rows.items()}
    reports = {split: examine(found, tokenizer, config.data) for split, found in shown.items()}
    shared = overlap(rows["train"], rows["val"], config.data) if val else {}
    problems = [
        f"{split}: {problem}" for split, report in reports.items() for problem in report.problems(config.data)
    ]
    problems += nameless
    has_scorer = _scorer_finder(config)
    if args.json:
        records = {split: _record(report, has_scorer) for split, report in reports.items()}
        print_json(
            {**records, "overlap": {str(row): other for row, other in shared.items()}, "problems": problems}
        )
    else:
        for split, report in reports.items():
            print_plain("\n".join(plain(line) for line in _lines(split, report, has_scorer)))
        if val:
            print_plain(_pairs_line("val rows whose prompt is also a train row", shared))
    for problem in problems:
        say(problem)
    return 2 if problems else 0


def _model_folder(args: argparse.Namespace, config: Config) -> str:
    if args.model:
        from strop.cli.models import find_model

        return str(find_model(args.model).folder)
    if not config.model.path:
        raise UsageError("lengths are counted in tokens of a model: name it with --model MODEL")
    return config.model.path


def _agent_problems(split: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each name of an agent that there is none of."""
    from strop.agents.registry import agents

    named: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        if row.get("agent_name"):
            named.setdefault(str(row["agent_name"]), []).append(number)
    return [
        f"{split}: {_count(len(numbers), 'row')}, the first is row {numbers[0]}, with agent_name {name!r}, but no "
        f"agent has that name; known: {', '.join(sorted(agents))}"
        for name, numbers in named.items()
        if name not in agents
    ]


def _scorer_finder(config: Config) -> Callable[[str], bool]:
    """Whether a data source has a scorer: the user's function scores every one."""
    from strop.rewards import known_data_sources

    known = known_data_sources()
    prefixes = tuple(name.removesuffix("*") for name in known if name.endswith("*"))
    return lambda source: bool(config.reward.path) or source in known or source.startswith(prefixes)


def _record(report: DataReport, has_scorer: Callable[[str], bool]) -> dict[str, Any]:
    from strop.checks.data_files import histogram

    return {
        "rows": report.num_rows,
        "sources": {
            name: {"rows": count, "has_scorer": has_scorer(name)} for name, count in report.sources.items()
        },
        "columns": {
            column.name: {"missing": column.num_missing, "first_missing": column.first_missing}
            for column in report.columns
        },
        "malformed": report.num_malformed,
        "malformed_first": list(report.malformed),
        "lengths": [dataclasses.asdict(one) for one in histogram(list(report.lengths.values()))],
        "max_prompt_tokens": report.limit,
        "over_limit": report.num_over,
        "repeats": {str(row): other for row, other in report.repeats.items()},
        "prompts": [dataclasses.asdict(shown) for shown in report.shown],
    }


def _lines(split: str, report: DataReport, has_scorer: Callable[[str], bool]) -> Iterator[str]:
    """What a person reads about one split."""
    yield f"{split}: {_count(report.num_rows, 'row')}"
    yield "  columns"
    width = max(len(column.name) for column in report.columns)
    for column in report.columns:
        gap = f", the first without is row {column.first_missing}" if column.num_missing else ""
        yield f"    {column.name:<{width}}  {report.num_rows - column.num_missing} of {report.num_rows}{gap}"
    yield "  data sources"
    width = max(map(len, report.sources), default=0)
    for name, count in report.sources.items():
        scorer = "has a scorer" if has_scorer(name) else "has no built-in scorer: set reward.path"
        yield f"    {shorten(name, 60):<{width}}  {_count(count, 'row')}, {scorer}"
    if report.num_malformed:
        yield f"  rows that cannot be turned into a prompt: {report.num_malformed}"
        yield from (f"    {sentence}" for sentence in report.malformed)
    yield from _length_lines(report)
    yield f"  {_pairs_line('rows that repeat the prompt of an earlier one', report.repeats)}"
    for shown in report.shown:
        yield f"  prompt of row {shown.row} ({shown.why}; {shown.num_tokens} tokens):"
        yield from (f"    | {line}" for line in shown.text.split("\n"))


def _length_lines(report: DataReport) -> Iterator[str]:
    from strop.checks.data_files import histogram

    lengths = list(report.lengths.values())
    if not lengths:
        return
    yield (
        f"  tokens after the chat template: {min(lengths)} to {max(lengths)}, median "
        f"{statistics.median_low(lengths)}; {report.num_over} over data.max_prompt_tokens={report.limit}"
    )
    bins = histogram(lengths)
    largest = max(one.count for one in bins)
    width = len(str(bins[-1].high))
    for one in bins:
        bar = "#" * -(-_BAR_WIDTH * one.count // largest)
        over = "  over the limit" if one.low > report.limit else ""
        over = "  the limit lies here" if one.low <= report.limit <= one.high else over
        yield f"    {one.low:>{width}} to {one.high:>{width}}  {bar:<{_BAR_WIDTH}} {one.count}{over}".rstrip()


def _pairs_line(what: str, pairs: Mapping[int, int]) -> str:
    if not pairs:
        return f"{what}: none"
    named = [f"{row} ({other})" for row, other in list(pairs.items())[:_NUM_PAIRS]]
    more = ", …" if len(pairs) > _NUM_PAIRS else ""
    return f"{what}: {len(pairs)}; row (the same as): {', '.join(named)}{more}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
