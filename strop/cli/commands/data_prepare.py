"""`strop data prepare`: the raw rows of a well-known data set as rows in verl's schema."""

from __future__ import annotations

import argparse
from pathlib import Path

from strop.utils.terminal import UsageError, plain, print_json, print_plain

SUMMARY = "NAME SRC: convert the raw rows of a well-known data set into rows for training"
OPTIONS = ("with_tool", "out")
"""Options of `strop data` that are its own."""


def run(args: argparse.Namespace) -> int:
    """Write the rows of a well-known data set."""
    words = [
        *args.words,
        *args.overrides,
        *([args.out] if args.out else []),
    ]  # OUT may also be the third word
    if len(words) != 3 or args.overrides:
        raise UsageError(f"prepare takes NAME SRC --out OUT, got {' '.join(words)}; see `strop data --help`")
    from strop.data.prepare import RECIPES, prepare_rows, write_rows
    from strop.data.readers import read_rows

    name, source, out = words[0], words[1], Path(words[2]).expanduser()
    if name not in RECIPES:  # before anything is fetched
        raise UsageError(f"there is no recipe for {name!r}; known: {', '.join(RECIPES)}")
    prepared = prepare_rows(name, read_rows([source]), split=out.stem, with_tool=args.with_tool)
    write_rows(out, prepared.rows)
    if args.json:
        print_json({"out": str(out), "rows": len(prepared.rows), "repeated": prepared.num_repeated})
        return 0
    num_rows = len(prepared.rows)
    repeated = f"; {prepared.num_repeated} repeated prompts left out" if prepared.num_repeated else ""
    print_plain(f"{num_rows} row{'' if num_rows == 1 else 's'} written to {plain(str(out))}{repeated}")
    return 0
