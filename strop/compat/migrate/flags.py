"""Launch scripts with flags, `--name value ...`, as OpenRLHF's: the flags of the one command that starts a training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.compat.migrate.shell import read_commands
from strop.compat.migrate.shell_words import Command, Word
from strop.compat.migrate.source import Found, environment_of, select_training, way_out

PROGRAMS: Mapping[str, str] = {
    "train_ppo_ray": "train",
    "train_ppo": "train",
    "train_grpo": "train",
    "train_grpo_ray": "train",
    "train_sft": "sft",
    "train_dpo": "prefer",
    "train_kto": "prefer",
    "train_rm": "prefer",
}
"""OpenRLHF's programs that have a counterpart, and the command of strop that is one."""
OTHERS: Mapping[str, str] = {
    "train_prm": "",
    "train_kd": (
        "log the teacher with `strop generate --top-logprobs` and fine-tune with `strop sft`: sft.distillation.coef is "
        "its kd_coef, sft.distillation.nll_coef 1 - kd_coef"
    ),
    "train_opd": "write `strop train` with algorithm=on_policy_distillation and teacher.path",
    "train_es_ray": "",
}
"""Programs that are not translated, and the replacement of each; empty where there is no counterpart."""
_REJECTION = re.compile(r"--post_processor[ =]+rs\b")
"""OpenRLHF's scripts that sample, keep the best and fine-tune, in turns."""
_PROGRAM = re.compile(rf"(?:^|[./])({'|'.join((*PROGRAMS, *OTHERS))})(?:\.py)?$")
_FLAG = re.compile(r"^--([A-Za-z][\w.-]*)(?:=(.*))?$", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Program that a script starts, and its flags."""

    program: str
    """Such as train_ppo_ray."""
    found: tuple[Found, ...]
    folder: Word | None = None
    """Folder that the script has changed to before the training; None where it has not."""


def read_openrlhf(path: Path, variables: Mapping[str, str], *, line: int | None = None) -> Flags:
    """The flags of the one training that a script starts.

    Args:
        path: shell script, or a file with the command alone.
        variables: values of shell variables, under those that the script assigns itself.
        line: of the training in a script that starts several.

    Raises:
        ValueError: the script cannot be read, or starts no training of OpenRLHF, more than one, or one that strop has
            no counterpart of.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if _REJECTION.search(text):
        raise ValueError(
            f"{path} samples, keeps the best answers (--post_processor rs) and fine-tunes, in turns: that is "
            f"one run of `strop train` with algorithm=raft; algorithm.keep.best is how many of a prompt are kept"
        )
    starts = [
        (command, position, program)
        for command in read_commands(text, variables, path=str(path))
        for position, program in [_program(command.words)]
        if program
    ]
    if not starts:
        raise ValueError(
            f"{path} has no command that starts a training of OpenRLHF, such as `python3 -m "
            f"openrlhf.cli.train_ppo_ray --pretrain MODEL ...`; give the script with that command"
        )
    different = {tuple(word.text for word in command.words[at:]) for command, at, _ in starts}
    chosen = (
        select_training([command for command, _, _ in starts], path, line)
        if line or len(different) > 1
        else 0
    )
    command, position, program = starts[chosen]
    if program in OTHERS:
        if OTHERS[program]:
            raise ValueError(f"{path} starts {program}, whose flags are not translated: {OTHERS[program]}")
        raise ValueError(
            f"{path} starts {program}, which strop has no counterpart of: it trains with rewards (train_ppo_ray), "
            f"on conversations (train_sft) and on preferences (train_dpo, train_kto, train_rm)"
        )
    location = f"{path.name}, line {command.line}"
    around = environment_of(command, command.words[:position], location, path.parent)
    settings = (*around, *flags_of(command, position + 1, path.name))
    return Flags(program=program, found=settings, folder=command.folder)


def _program(words: Sequence[Word]) -> tuple[int, str]:
    """Position and name of the program that trains; no name in other commands."""
    for position, word in enumerate(words):
        program = _PROGRAM.search(word.text)
        if program is not None:
            return position, program[1]
    return 0, ""


def flags_of(command: Command, start: int, name: str) -> list[Found]:
    """The flags of a command, from a position among its words on.

    Args:
        command: with `--name value ...`, or `--name=value`.
        start: the position.
        name: of the file it stands in.
    """
    return list(_flags(command, start, name))


def _flags(command: Command, start: int, name: str) -> Iterator[Found]:
    words = [word for word in command.words[start:] if word.text != "\\"]
    position = 0
    while position < len(words):
        word = words[position]
        location = f"{name}, line {word.line}"
        position += 1
        flag = _FLAG.match(word.text)
        if flag is None:
            yield Found(key=word.text, value="", place=location, problem="is no flag, which begin with --")
            continue
        values = [] if flag[2] is None else [word]
        texts = [] if flag[2] is None else [flag[2]]
        while flag[2] is None and position < len(words) and not _FLAG.match(words[position].text):
            values.append(words[position])
            texts.append(words[position].text)
            position += 1
        parsed = [_value(text) for text in texts]
        yield Found(
            key=flag[1].replace("-", "_"),
            value=True if not parsed else parsed[0] if len(parsed) == 1 else parsed,
            place=location,
            unresolved=tuple(part for value in values for part in value.unresolved),
            way_out=_way_out(values),
        )


def _way_out(values: Sequence[Word]) -> str:
    return next(
        (way_out(value) for value in values if value.variables), "write the value itself into the script"
    )


def _value(text: str) -> Any:
    """A number, true or false where it is one; text otherwise, as argparse gets it."""
    if text in ("True", "true", "False", "false"):
        return text in ("True", "true")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
