"""`strop migrate`: the settings of a verl, TRL or OpenRLHF training as a configuration of strop, each accounted for.

Exit codes: 0 every setting is translated, not needed or refused, and the configuration loads; 2 a setting is unknown
or could not be read, or the configuration does not load. Nothing is written then, unless --keep-going says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.settings import user_path
from strop.utils.sanitize import remember_secrets_in, secrets_in
from strop.utils.shell_words import shell_word
from strop.utils.terminal import UsageError, plain, print_json, print_plain, say, shorten

if TYPE_CHECKING:
    from strop.compat.migrate import Migration, Row

SUMMARY = "translate settings of verl, TRL or OpenRLHF into a configuration of strop"
EPILOG = """\
examples:
  strop migrate verl run_grpo.sh
  strop migrate verl run_grpo.sh --out grpo.yaml --set MODEL=models/qwen
  strop migrate verl base.yaml run_grpo.sh --out grpo.yaml
  strop migrate trl train_grpo.py --out grpo.yaml --processes 8
  strop migrate trl run_sft.sh --out sft.yaml sft.max_steps=100
  strop migrate openrlhf train_reinforce.sh --out reinforce.yaml

Scripts are read, never run. The table lists every setting that was found: not there yet, where the run goes without
it; translated, with our key and value; not needed, with the reason; refused, with the reason. `default` marks what
the other library assumes where the script says nothing
and strop would assume something else.
"""

_HEADINGS = {
    "not there": "not there yet: the run goes without",
    "translated": "translated",
    "not needed": "not needed",
    "refused": "refused: strop does something else, or nothing",
    "unresolved": "not read: decide about these yourself",
    "unknown": "unknown",
}
_WIDTH = 58


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "library", choices=("verl", "trl", "openrlhf"), help="library that the settings are for"
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=user_path,
        metavar="FILE",
        help="verl: launch script, or YAML file (.yaml), or several, later ones winning; trl: a Python script, a "
        "launch script with flags or a YAML file; openrlhf: one launch script. Behind them settings of ours, KEY=VALUE",
    )
    parser.add_argument(
        "-o", "--out", type=user_path, metavar="OUT", help="write the configuration to this YAML file"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a variable of the shell, or of the environment, whatever the script says",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="trl: how many processes the script was started with (default: what the launch script says, or 1)",
    )
    parser.add_argument(
        "--line",
        type=int,
        metavar="N",
        help="line of the training to translate, in a script that starts several",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="write what there is, although something is open"
    )
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    args.copies, overrides = {}, _own_settings(args)
    for path in args.files:
        if not path.exists():
            raise UsageError(
                f"there is no file {path}: name the script or YAML file that starts the training"
            )
    migration, command = _migrate(args, engine=overrides.get("rollout.engine"))
    migration = dataclasses.replace(migration, overrides=overrides)
    values = migration.values
    for line in _table(migration):
        print_plain(plain(line))
    problems = [*_unmapped_sentences(migration), *_load_problems(values)]
    for problem in problems:
        say(problem)
    is_written = args.out is not None and (not problems or args.keep_going)
    if is_written:
        _write_copies(args.copies)
        _write(args.out, values, [path.name for path in args.files])
        use = f"train with: strop {command} --config {shell_word(args.out)} --out runs/NAME"
        if command == "eval":
            use = f"validate with: strop eval --config {shell_word(args.out)}"
        print_plain(f"\nwritten to {args.out}; {use}")
    elif args.out is not None:
        say(f"{args.out} is not written; --keep-going writes it all the same")
    else:
        print_plain("\nnothing is written; --out OUT writes the configuration")
    if args.json:
        counts = {status: sum(row.outcome.status == status for row in migration.rows) for status in _HEADINGS}
        out = str(args.out) if is_written else None
        print_json({**counts, "problems": problems, "written": out, "config": values})
    return 2 if problems and not args.keep_going else 0


def _migrate(args: argparse.Namespace, *, engine: object) -> tuple[Migration, str]:
    """The migration, and the command that takes its result; with the engine that is given beside the files."""
    from strop.compat.migrate import (
        COMMANDS,
        PROGRAMS,
        migrate_openrlhf,
        migrate_trl,
        migrate_verl,
        migrate_verl_sft,
        moved,
        read_openrlhf,
        read_trl,
        read_verl,
        verl_command,
    )

    if args.library == "trl":
        if len(args.files) > 1:
            raise UsageError(f"a TRL training is one script; {len(args.files)} files were given")
        if args.processes is not None and args.processes < 1:
            raise UsageError(f"--processes is {args.processes}; use at least 1")
        rewards = Path(f"{args.files[0].stem}_rewards.py")
        rewards = rewards if args.out is None else args.out.with_name(rewards.name)
        script = read_trl(args.files[0], _variables(args.set), rewards=rewards, line=args.line)
        args.copies = {rewards: script.copied} if script.copied else {}
        processes = args.processes or script.processes or 1
        if script.counted_in and args.processes is None:
            say(
                f"how many processes are started stands in {script.counted_in}, which is not here or does not say it: "
                f"--processes N says it; 1 is assumed, and batch sizes follow from it"
            )
        migration = migrate_trl(script.found, script.kind, processes=processes, engine=engine)
        migration = moved(migration, script.folder, args.files[0].name)
        return migration, COMMANDS.get(script.kind, "train")
    if args.library == "openrlhf":
        if len(args.files) > 1:
            raise UsageError(f"an OpenRLHF training is one script; {len(args.files)} files were given")
        variables = {**_shell_variables(), **_variables(args.set)}
        flags = read_openrlhf(args.files[0], variables, line=args.line)
        migration = moved(migrate_openrlhf(flags, engine=engine), flags.folder, args.files[0].name)
        return migration, PROGRAMS[flags.program]
    source = read_verl(args.files, {**_shell_variables(), **_variables(args.set)}, line=args.line)
    name = args.files[-1].name
    if source.is_sft:
        return moved(migrate_verl_sft(source.found), source.folder, name), "sft"
    return moved(migrate_verl(source.found, engine=engine), source.folder, name), verl_command(source.found)


def _own_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of ours among the arguments, by their full keys; files stay in `args.files`."""
    from strop.config.overrides import parse_override

    overrides = [parse_override(text) for text in map(str, args.files) if _is_setting(text)]
    for override in overrides:
        if key := next((key for key, _ in secrets_in(override.value, override.key)), ""):
            raise UsageError(
                f"{key} holds a secret, which is not written into a file: leave it out, and put it into a variable of "
                f"the environment"
            )
    args.files = [path for path in args.files if not _is_setting(str(path))]
    if not args.files:
        raise UsageError("no file was given: name a launch script, a Python script or a YAML file")
    return {override.key: override.value for override in overrides}


def _is_setting(text: str) -> bool:
    """True if an argument is KEY=VALUE of ours, and no file."""
    return "=" in text.split("/")[0] and not Path(text).exists()


def _shell_variables() -> dict[str, str]:
    """Shell variables of a script that is started here."""
    return {"HOME": os.environ.get("HOME", "~"), "PWD": str(Path.cwd())}


def _variables(texts: list[str]) -> dict[str, str]:
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {text!r} is no NAME=VALUE")
        variables[name] = value
    remember_secrets_in(variables)
    return variables


def _table(migration: Migration) -> list[str]:
    """The rows by what became of them, one line each."""
    lines = []
    for status, heading in _HEADINGS.items():
        rows = [row for row in migration.rows if row.outcome.status == status]
        if rows:
            lines += ["", f"{heading} ({len(rows)})", *map(_line, rows)]
    return lines[1:]


def _line(row: Row) -> str:
    mark = " (default)" if row.place == "default" else ""
    theirs = f"{row.key}={_shown(row.value)}{mark}"
    ours = ", ".join(f"{key}={_shown(value)}" for key, value in row.outcome.ours.items())
    arrow = f"-> {ours}" if ours else ""
    note = f"({row.outcome.note})" if ours and row.outcome.note else row.outcome.note
    return f"  {theirs:<{_WIDTH}} {' '.join(part for part in (arrow, note) if part)}".rstrip()


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return shorten(text, 60)


def _unmapped_sentences(migration: Migration) -> list[str]:
    """Sentences about options that the migration does not cover."""
    sentences = [f"{row.place}: {row.key}: {row.outcome.note}" for row in migration.open_rows]
    for key, rows in migration.clashes().items():
        settings = ", ".join(f"{row.key}={_shown(row.value)}" for row in rows)
        say(f"{key} is set by several settings, of which the last one counts: {settings}")
    return sentences


def _load_problems(values: dict[str, Any]) -> list[str]:
    """Reasons why the configuration does not load; empty where it does."""
    from strop.config import ConfigError, config_of
    from strop.trainer.config import Config

    try:
        config_of(Config, values)
    except ConfigError as error:
        return [f"the configuration does not load yet: {error}"]
    return []


def _write_copies(copies: dict[Path, str]) -> None:
    """Reward functions in files of their own; a file that says something else is left as it is."""
    for path, text in copies.items():
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise UsageError(f"{path} exists and holds something else: move it away, or give another --out")
        path.write_text(text, encoding="utf-8")
        print_plain(f"\nthe reward functions are copied into {path}")


def _write(path: Path, values: dict[str, Any], names: list[str]) -> None:
    from strop.config.yaml_text import dump

    header = f"# Made by `strop migrate` from {', '.join(names)}. Paths start at the current directory.\n"
    path.write_text(header + dump(values), encoding="utf-8")
