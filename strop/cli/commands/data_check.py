"""`strop data check`: data files before a run, read the way it would, with everything that is wrong in them."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strop.cli.settings import load_settings
from strop.cli.unused_keys import BUDGET, ORDER, Reads, refuse_unread
from strop.rewards.scorers import known_data_sources
from strop.utils.terminal import UsageError, plain, print_json, print_plain, say, shorten

if TYPE_CHECKING:
    from strop.data.file_check import DataReport
    from strop.trainer.config import Config

SUMMARY = "report all problems in the rows of FILE ..., read as `strop train` would"
OPTIONS = ("model", "val", "config")
"""Options of `strop data` that are its own."""
READS = Reads(
    keys=(
        "model", "data", "agent", "reward.path", "trainer.seed", "algorithm.extensions", BUDGET,
        "trainer.max_steps",  # streaming is refused without
    ),
    but=ORDER,
)  # fmt: skip
_BAR_WIDTH = 40
_NUM_PAIRS = 5


def run(args: argparse.Namespace) -> int:
    """Read the files as a run would, and say what is wrong with them."""
    files = args.words
    config = load_settings(args, needs=("model", "data", "agent"))
    refuse_unread(args, "data check", READS)
    train = files or list(config.data.train_files)
    val = args.val or ([] if files else list(config.data.val_files))
    if not train:
        raise UsageError("name the files to check, or a configuration with data.train_files (--config FILE)")
    from strop.agents.setup import AgentSetup
    from strop.data.file_check import examine, overlap
    from strop.data.loading import load_rows
    from strop.engines.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(dataclasses.replace(config.model, path=_model_folder(args, config)))
    data = dataclasses.replace(config.data, train_files=tuple(train), val_files=tuple(val))
    rows = {"train": load_rows(data, "train", tokenizer, seed=config.trainer.seed)}
    if val:
        rows["val"] = load_rows(data, "val", tokenizer)
    setup = AgentSetup(config.agent, tokenizer, template_options=config.data.chat_template_kwargs)
    nameless = [line for split, split_rows in rows.items() for line in _agent_problems(split, split_rows)]
    shown = (
        rows
        if nameless
        else {split: setup.with_agent_and_tools(split_rows, split) for split, split_rows in rows.items()}
    )
    reports = {split: examine(split_rows, tokenizer, config.data) for split, split_rows in shown.items()}
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
        from strop.evaluation.models import find_model

        return str(find_model(args.model, weights=False).folder)
    if not config.model.path:
        raise UsageError("lengths are counted in tokens of a model: name it with --model MODEL")
    from strop.trainer.model_locations import POLICY, locate

    return locate(config, say=say, weights=False, keys=POLICY).config.model.path


def _agent_problems(split: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each name of an agent that there is none of."""
    from strop.agents.builtin import agents

    named: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        if row.get("agent_name"):
            named.setdefault(str(row["agent_name"]), []).append(number)
    return [
        f"{split}: {_rows(len(numbers))}, the first is row {numbers[0]}, with agent_name {name!r}, but no "
        f"agent has that name; known: {', '.join(agents.names())}"
        for name, numbers in named.items()
        if name not in agents
    ]


def _scorer_finder(config: Config) -> Callable[[str], bool]:
    """Predicate: True if a data source has a scorer; the user's function scores every one."""
    data_sources = known_data_sources()
    prefixes = tuple(name.removesuffix("*") for name in data_sources if name.endswith("*"))
    return lambda source: bool(config.reward.path) or source in data_sources or source.startswith(prefixes)


def _record(report: DataReport, has_scorer: Callable[[str], bool]) -> dict[str, Any]:
    from strop.data.file_check import histogram

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
        "notes": list(report.notes),
        "lengths": [
            dataclasses.asdict(bin_of_lengths) for bin_of_lengths in histogram(list(report.lengths.values()))
        ],
        "max_prompt_tokens": report.limit,
        "over_limit": report.num_over,
        "repeats": {str(row): other for row, other in report.repeats.items()},
        "prompts": [dataclasses.asdict(shown) for shown in report.shown],
    }


def _lines(split: str, report: DataReport, has_scorer: Callable[[str], bool]) -> Iterator[str]:
    """Lines of the printed report on one split."""
    yield f"{split}: {_rows(report.num_rows)}"
    yield "  columns"
    width = max(len(column.name) for column in report.columns)
    for column in report.columns:
        gap = f", the first without is row {column.first_missing}" if column.num_missing else ""
        yield f"    {column.name:<{width}}  {report.num_rows - column.num_missing} of {report.num_rows}{gap}"
    yield "  data sources"
    width = max(map(len, report.sources), default=0)
    for name, count in report.sources.items():
        scorer = "has a scorer" if has_scorer(name) else "has no built-in scorer: set reward.path"
        yield f"    {shorten(name, 60):<{width}}  {_rows(count)}, {scorer}"
    if report.num_malformed:
        yield f"  rows that cannot be turned into a prompt: {report.num_malformed}"
        yield from (f"    {sentence}" for sentence in report.malformed)
    yield from (f"  {note}" for note in report.notes)
    yield from _length_lines(report)
    yield f"  {_pairs_line('rows that repeat the prompt of an earlier one', report.repeats)}"
    for shown in report.shown:
        yield f"  prompt of row {shown.row} ({shown.why}; {shown.num_tokens} tokens):"
        yield from (f"    | {line}" for line in shown.text.split("\n"))


def _length_lines(report: DataReport) -> Iterator[str]:
    from strop.data.file_check import histogram

    lengths = list(report.lengths.values())
    if not lengths:
        return
    yield (
        f"  tokens after the chat template: {min(lengths)} to {max(lengths)}, median "
        f"{statistics.median_low(lengths)}; {report.num_over} over data.max_prompt_tokens={report.limit}"
    )
    bins = histogram(lengths)
    largest = max(length_bin.count for length_bin in bins)
    width = len(str(bins[-1].high))
    for length_bin in bins:
        bar = "#" * -(-_BAR_WIDTH * length_bin.count // largest)
        over = "  over the limit" if length_bin.low > report.limit else ""
        over = "  the limit lies here" if length_bin.low <= report.limit <= length_bin.high else over
        bounds = f"{length_bin.low:>{width}} to {length_bin.high:>{width}}"
        yield f"    {bounds}  {bar:<{_BAR_WIDTH}} {length_bin.count}{over}".rstrip()


def _pairs_line(label: str, pairs: Mapping[int, int]) -> str:
    if not pairs:
        return f"{label}: none"
    named = [f"{row} ({other})" for row, other in list(pairs.items())[:_NUM_PAIRS]]
    more = ", …" if len(pairs) > _NUM_PAIRS else ""
    return f"{label}: {len(pairs)}; row (the same as): {', '.join(named)}{more}"


def _rows(number: int) -> str:
    return f"{number} row{'' if number == 1 else 's'}"
