"""`strop config`: the settings a command would use (show), all about one key (explain), two runs compared (diff)."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from strop.cli.settings import add_config_arguments
from strop.compat.key_aliases import aliases_beside
from strop.utils import trust
from strop.utils.terminal import UsageError, plain, print_json, print_plain

if TYPE_CHECKING:
    from strop.config.docs import FieldDoc

SUMMARY = "show and explain settings, or compare those of two runs"
ACTIONS = ("show", "explain", "diff")
EPILOG = """\
examples:
  strop config show --docs
  strop config show --config examples/arithmetic/config.yaml algorithm=dapo_loss
  strop config show --config runs/arithmetic/config.yaml --json
  strop config show --resolved algorithm=dapo trainer.max_steps=100
  strop config explain algorithm.clip_ratio_high
  strop config explain algorithm.policy_loss
  strop config diff runs/first runs/second
  strop config diff first.yaml runs/second

show takes settings like every other command. explain takes one key, of a value or of a section. diff takes two run
folders or YAML files; the defaults and presets of a file count as its values.
"""

_COMMENT_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "action",
        choices=ACTIONS,
        metavar="|".join(ACTIONS),
        help="print the resolved settings as YAML; explain one key; compare two runs",
    )
    add_config_arguments(parser)
    parser.add_argument("--docs", action="store_true", help="show: say above each key what it means")
    parser.add_argument(
        "--resolved", action="store_true", help="show: say beside each value where it comes from"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    if args.action == "show":
        return _show(args)
    from strop.cli.explain import diff, explain

    for option in ("config", "docs", "resolved"):
        if getattr(args, option):
            raise UsageError(f"--{option} belongs to `strop config show`; leave it out")
    return explain.run(args) if args.action == "explain" else diff.run(args)


def _show(args: argparse.Namespace) -> int:
    from strop.config import to_dict, to_flat_dict
    from strop.config.docs import describe
    from strop.config.yaml_text import dump
    from strop.trainer.loading import load_and_tell

    # To look at settings runs nothing of what they name, whoever wrote them.
    trust.close(str(args.config or "the configuration"))
    if args.docs and args.resolved:
        raise UsageError("--docs and --resolved do not go together: one comment per key; choose one")
    config, known_origin = load_and_tell(
        args.config,
        overrides=args.overrides,
        aliases=aliases_beside(("out", "resume"), "the option --{} of `strop train`"),
    )
    origin_of = known_origin if args.resolved else None
    values = to_dict(config)
    docs = {doc.key: doc for doc in describe(type(config))}
    if args.json and origin_of is not None:
        leaves = to_flat_dict(config).items()
        print_json({key: {"value": value, "origin": origin_of(key)} for key, value in leaves})
    elif args.json:
        print_json(values)
    elif args.docs:
        print_plain("\n".join(_documented(values, docs)))
    elif origin_of is not None:
        print_plain("\n".join(_with_origins(values, docs, origin_of)))
    else:
        print_plain(dump(values), end="")
    return 0


def _documented(values: Mapping[str, Any], docs: Mapping[str, FieldDoc]) -> Iterator[str]:
    """Lines of YAML, each key under a comment with its meaning, type and default."""
    from strop.config.yaml_text import dump

    for entry in _entries_of(values, docs):
        if entry.is_section:
            yield f"{entry.indent}{entry.name}:"
            continue
        doc = docs[entry.key]
        yield textwrap.fill(
            f"{doc.doc} ({doc.type}; default {_shown(doc.default)})".strip(),
            width=_COMMENT_WIDTH,
            initial_indent=f"{entry.indent}# ",
            subsequent_indent=f"{entry.indent}# ",
            break_on_hyphens=False,
        )
        yield textwrap.indent(dump({entry.name: entry.value}).rstrip("\n"), entry.indent)


def _with_origins(
    values: Mapping[str, Any], docs: Mapping[str, FieldDoc], origin_of: Callable[[str], str]
) -> Iterator[str]:
    """Lines of YAML, each value with a comment that says where it comes from."""
    from strop.config.yaml_text import dump

    for entry in _entries_of(values, docs):
        if entry.is_section:
            yield f"{entry.indent}{entry.name}:"
            continue
        origin = plain(origin_of(entry.key), is_one_line=True)
        first, *rest = dump({entry.name: entry.value}).rstrip("\n").splitlines()
        if rest and isinstance(
            entry.value, str
        ):  # a comment inside a text of several lines would be part of it
            lines = [f"# {origin}", first, *rest]
        else:
            lines = [f"{first}  # {origin}", *rest]
        yield from (f"{entry.indent}{line}" for line in lines)


class _Entry(NamedTuple):
    """A key of the tree, at its depth."""

    key: str
    name: str
    value: Any
    is_section: bool
    indent: str


def _entries_of(
    values: Mapping[str, Any], docs: Mapping[str, FieldDoc], above: _Entry | None = None
) -> Iterator[_Entry]:
    """Every key in order, a section before what is in it."""
    for name, value in values.items():
        key, indent = (name, "") if above is None else (f"{above.key}.{name}", f"{above.indent}  ")
        is_section = isinstance(value, dict) and any(documented.startswith(f"{key}.") for documented in docs)
        entry = _Entry(key, name, value, is_section, indent)
        yield entry
        if is_section:
            yield from _entries_of(value, docs, entry)


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
