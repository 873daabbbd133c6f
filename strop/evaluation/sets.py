"""`--data`: files, or sets by name with the prompts and the scorer that belong to them."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from strop.utils.terminal import UsageError, say

_SET_ROWS = (
    "data.prompt_key=prompt",
    "data.data_source_key=data_source",
    "data.ground_truth_key=reward_model.ground_truth",
)
_SET_SCORER = ("reward.path=''", "reward.functions=[]", "reward.manager=''", "data.dataset_class.path=''")
"""Settings of rows and rewards that a set replaces."""


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--data FILE|NAME[=COPY]`."""
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE|NAME[=COPY]",
        help="prompts, as data.val_files, or a set by name, from where it is published or from a copy of its raw rows: "
        f"{', '.join(names())}; may be repeated",
    )


SETS = ("gsm8k", "math500", "aime24", "aime25", "reasoning_gym/")
"""Names of sets, and beginnings of names."""


def _rows_of(entry: str) -> Callable[[str, str], list[dict[str, Any]]]:
    """Reader of a set: a function of its name and its source (empty: the published one)."""
    if entry == "reasoning_gym/":
        from strop.rewards.scorers.reasoning_gym_rows import rows_of_set as generated

        return generated
    from strop.evaluation.well_known_sets import rows_of_set

    return rows_of_set


def names() -> list[str]:
    """Names of the sets; TASK stands for any ending."""
    return [f"{name}TASK" if name.endswith("/") else name for name in SETS]


@contextlib.contextmanager
def data_of(args: argparse.Namespace) -> Iterator[None]:
    """The settings that --data stands for among the overrides, while this lasts.

    Raises:
        UsageError: sets and files together.
        ValueError, FileNotFoundError: a set cannot be read.
    """
    with contextlib.ExitStack() as stack:
        sets = [word for word in args.data if _set_of(word)]
        if sets and len(sets) < len(args.data):
            raise UsageError(
                f"--data {sets[0]} brings its own columns and scorer: evaluate files of your own with another command"
            )
        unknown = next((word for word in args.data if word.isidentifier() and not _set_of(word)), "")
        if unknown and not Path(unknown).exists():
            raise UsageError(f"--data {unknown} is no file, and no set; the sets are {', '.join(names())}")
        files = args.data
        if sets:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strop-set-")))
            files = [_write_set(word, folder) for word in sets]
            overridden = [word.split("=", 1)[0] for word in args.overrides]
            set_overrides = [
                word for word in (*_SET_ROWS, *_SET_SCORER) if word.split("=", 1)[0] not in overridden
            ]
            args.overrides = [*set_overrides, *args.overrides]
        if files:
            args.overrides = [*args.overrides, f"data.val_files=[{','.join(map(repr, files))}]"]
        yield


def _set_of(word: str) -> str:
    """The entry of the set that a word names; empty for a file."""
    name = word.partition("=")[0]
    if Path(word).exists():
        return ""
    return next(
        (entry for entry in SETS if name == entry or (entry.endswith("/") and name.startswith(entry))),
        "",
    )


def _write_set(word: str, folder: Path) -> str:
    """A file with the rows of a set."""
    import pyarrow
    import pyarrow.parquet

    name, _, source = word.partition("=")
    rows = _rows_of(_set_of(word))(name, source)
    file = folder / f"{name.replace('/', '-')}.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    say(f"{name}: {len(rows)} prompts{f' of {source}' if source else ''}, scored as {rows[0]['data_source']}")
    return str(file)
