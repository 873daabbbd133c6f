"""`strop config show`: the settings a command would use, and what they mean."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from strop.cli.output import print_json
from strop.cli.settings import add_config_arguments, load_settings

if TYPE_CHECKING:
    from strop.config import FieldDoc

EPILOG = """\
examples:
  strop config show --docs
  strop config show --config examples/arithmetic/config.yaml algorithm=dapo_loss
  strop config show --config runs/arithmetic/config.yaml --json
"""

_COMMENT_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "action", choices=("show",), metavar="show", help="print the resolved settings as YAML"
    )
    add_config_arguments(parser)
    parser.add_argument("--docs", action="store_true", help="say above each key what it means")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of YAML")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    config = load_settings(args)
    from strop.config import describe, to_dict
    from strop.config.yaml_text import dump

    values = to_dict(config)
    if args.json:
        print_json(values)
    elif args.docs:
        docs = {doc.key: doc for doc in describe(type(config))}
        print("\n".join(_documented(values, docs, "", "")))
    else:
        print(dump(values), end="")
    return 0


def _documented(
    values: Mapping[str, Any], docs: Mapping[str, FieldDoc], prefix: str, indent: str
) -> Iterator[str]:
    """Lines of YAML, each key under a comment with its meaning, type and default."""
    from strop.config.yaml_text import dump

    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and any(known.startswith(f"{key}.") for known in docs):
            yield f"{indent}{name}:"
            yield from _documented(value, docs, f"{key}.", f"{indent}  ")
            continue
        doc = docs[key]
        default = "required" if doc.required else f"default {json.dumps(doc.default, ensure_ascii=False)}"
        comment = f"{doc.doc} ({doc.type}; {default})".strip()
        yield textwrap.fill(
            comment,
            width=_COMMENT_WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
            break_on_hyphens=False,
        )
        yield textwrap.indent(dump({name: value}).rstrip("\n"), indent)
