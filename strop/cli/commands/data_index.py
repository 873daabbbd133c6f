"""`strop data index`: the search index of a corpus of one's own."""

from __future__ import annotations

import argparse
from pathlib import Path

from strop.agents.tools.search_index import build_index
from strop.utils.terminal import UsageError, plain, print_json, print_plain

SUMMARY = "CORPUS: build the index of the search tool from a file with a passage per line"
OPTIONS = ("out",)
"""Options of `strop data` that are its own."""


def run(args: argparse.Namespace) -> int:
    """Write the index of a corpus."""
    if len(args.words) != 1 or args.overrides or not args.out:
        raise UsageError(
            "index takes one corpus and --out FILE: strop data index corpus.jsonl --out index.sqlite"
        )
    count = build_index(Path(args.words[0]), Path(args.out))
    if args.json:
        print_json({"index": args.out, "passages": count})
    else:
        print_plain(f"{plain(args.out)}: {count} passages")
    return 0
