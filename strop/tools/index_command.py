"""`strop data index`: the search index of a corpus of one's own."""

from __future__ import annotations

import argparse
from pathlib import Path

from strop.cli.output import UsageError, plain, print_json, print_plain
from strop.tools.search_index import build_index


def run(args: argparse.Namespace) -> int:
    """Write the index of a corpus."""
    if len(args.words) != 1 or not args.out or args.model or args.val or args.with_tool or args.config:
        raise UsageError(
            "index takes one corpus and --out FILE: strop data index corpus.jsonl --out index.sqlite"
        )
    count = build_index(Path(args.words[0]), Path(args.out))
    if args.json:
        print_json({"index": args.out, "passages": count})
    else:
        print_plain(f"{plain(args.out)}: {count} passages")
    return 0
