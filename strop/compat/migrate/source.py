"""Settings as they were found in launch scripts and YAML files, before anything is made of them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from strop.compat.migrate.shell import read_commands
from strop.compat.migrate.shell_words import Command, Word
from strop.config.overrides import parse_override
from strop.config.yaml_text import parse

PROGRAM = re.compile(r"(?:^|[./])(main_\w+|fully_async_main|\w*sft_trainer\w*)(?:\.py)?$")
"""Programs that take the settings: verl.trainer.main_ppo, recipe.dapo.main_dapo, verl.trainer.fsdp_sft_trainer."""

MODELSCOPE = "VERL_USE_MODELSCOPE"
"""Variable by which verl takes names of models to be ModelScope's."""

GIVEN = " (given)"
"""Mark of a configuration file that is read along with the script that names it."""

PRIME = "main_prime"
"""The program of a recipe in which `reward_model` is a model that learns."""

_OF_LIBRARIES = re.compile(
    r"(?:NCCL|VLLM|SGLANG|SGL|CUDA|HF|RAY|TOKENIZERS|WANDB|SWANLAB|MLFLOW|PYTORCH|TORCH|HCCL|ASCEND|GLOO|UCX|OMP|TRITON"
    r"|TRANSFORMERS|FLASHINFER|OPENAI)_\w+|HYDRA_FULL_ERROR"
)
"""Variables that libraries read, by their names."""

_OVERRIDE = re.compile(r"^(\+\+|\+|~)?([A-Za-z_][\w./@\-]*)(=.*)?$", re.DOTALL)
_INTERPOLATION = re.compile(r"\$\{[^}]*\}")


@dataclass(frozen=True, kw_only=True)
class Found:
    """One setting."""

    key: str
    """Full key, with dots."""
    value: Any
    """Plain value; as text where it could not be read or filled in."""
    place: str
    """`run.sh, line 12` or the name of a YAML file."""
    written: str = ""
    """How the key is written there, where its row has another name."""
    kind: Literal["set", "reset"] = "set"
    unresolved: tuple[str, ...] = ()
    """Names in the value that nothing says what they stand for."""
    why: str = "is not set in what was given"
    """What is the matter with them."""
    way_out: str = ""
    """What a user can do about them."""
    problem: str = ""
    """Why the setting could not be read at all."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """All settings of the given files, and which program they are for."""

    found: tuple[Found, ...]
    is_sft: bool = False
    """Supervised fine-tuning rather than reinforcement learning."""
    folder: Word | None = None
    """Where the script has changed to before the training; None where it has not."""


def read_verl(files: Sequence[Path], variables: Mapping[str, str], *, line: int | None = None) -> Source:
    """The settings of launch scripts and YAML files; those of a later file come after.

    Args:
        files: .yaml and .yml are configuration trees, all others shell scripts.
        variables: values of shell variables, under those that the scripts assign themselves.
        line: of the training in a script that starts several.

    Raises:
        ValueError: a file is no YAML or shell script, or starts no training, or more than one.
        OSError: a file cannot be read.
    """
    found: list[Found] = []
    is_sft, folder = False, None
    trees = {path.stem for path in files if path.suffix in (".yaml", ".yml")}
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
        if path.suffix in (".yaml", ".yml"):
            tree = _tree(text, path)
            is_sft = is_sft or (
                "actor_rollout_ref" not in tree and "partial_pretrain" in (tree.get("model") or {})
            )
            found.extend(_leaves(tree, "", path.name))
        else:
            command, start = _training(text, path, variables, line)
            folder = command.folder
            is_sft = is_sft or "sft" in command.words[start].text
            settings = list(_settings(command, start, path))
            for named in _named_files(settings, path, files):
                found.extend(_leaves(_tree(named.read_text(encoding="utf-8"), named), "", named.name))
                trees.add(named.stem)
            found.extend(settings)
    given = _interpolated([_with_given(one, trees) for one in found])
    return Source(found=tuple(given), is_sft=is_sft, folder=folder)


def _interpolated(found: Sequence[Found]) -> Iterator[Found]:
    """Settings with ${other.key} in their values replaced, where that key has a value of its own."""
    known = {
        one.key: one.value for one in found if one.kind == "set" and not one.unresolved and not one.problem
    }
    for one in found:
        names = {name: name[2:-1] for name in one.unresolved}
        if not one.unresolved or not isinstance(one.value, str) or not set(names.values()) <= known.keys():
            yield one
            continue
        value: Any = one.value
        for name, key in names.items():
            value = known[key] if value == name else str(value).replace(name, str(known[key]))
        yield dataclasses.replace(one, value=value, unresolved=())


def _with_given(one: Found, trees: Collection[str]) -> Found:
    """The name of a configuration file with a mark, where that file is among those that are read."""
    is_given = one.key == "--config-name" and str(one.value).removesuffix(".yaml") in trees
    return dataclasses.replace(one, value=f"{one.value}{GIVEN}") if is_given else one


def _named_files(settings: Sequence[Found], script: Path, given: Sequence[Path]) -> list[Path]:
    """Configuration files that a script names by --config-path and --config-name and that are there, those that they
    build on first; none where one of that name was given."""
    said = {one.key: str(one.value) for one in settings if one.key.startswith("--config-")}
    name = said.get("--config-name", "").removesuffix(".yaml")
    place = said.get("--config-path") or said.get("--config-dir") or "."
    if not name or any(path.stem == name for path in given):
        return []
    for folder in (Path(place), script.parent / place):
        if (folder / f"{name}.yaml").is_file():
            return _with_bases(folder / f"{name}.yaml", [])
    return []


def _with_bases(path: Path, seen: Sequence[Path]) -> list[Path]:
    """A configuration file behind those of its folder that its `defaults` name."""
    tree = _tree(path.read_text(encoding="utf-8"), path)
    names = [one for one in tree.get("defaults") or [] if isinstance(one, str) and one != "_self_"]
    bases = [path.with_name(f"{name.removesuffix('.yaml')}.yaml") for name in names]
    chosen = [base for base in bases if base.is_file() and base not in (*seen, path)]
    return [*(one for base in chosen for one in _with_bases(base, (*seen, path))), path]


def _tree(text: str, path: Path) -> dict[str, Any]:
    tree = parse(text, str(path))
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds {tree!r:.60}, but a configuration is a mapping of keys to values")
    return tree


def _leaves(tree: Mapping[Any, Any], prefix: str, place: str) -> Iterator[Found]:
    """Each value of a nested tree under its full key; an empty mapping is a value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.", place)
            continue
        names = tuple(_INTERPOLATION.findall(str(value))) if "${" in str(value) else ()
        yield Found(
            key=key,
            value=value,
            place=place,
            unresolved=names,
            way_out="write the value itself into the file",
        )


def _training(text: str, path: Path, variables: Mapping[str, str], line: int | None) -> tuple[Command, int]:
    """The one command that starts a training, and the position of the program among its words."""
    starts = []
    for command in read_commands(text, variables, path=str(path)):
        position = _program(command)
        if position is not None:
            starts.append((command, position))
    if not starts:
        raise ValueError(
            f"{path} has no command that starts a training of verl, such as `python -m verl.trainer.main_ppo "
            f"key=value ...`; give the script with that command, or a YAML file (.yaml)"
        )
    return starts[the_one([command for command, _ in starts], path, line)]


def the_one(starts: Sequence[Command], path: Path, line: int | None) -> int:
    """Which of the trainings that a script starts is meant.

    Raises:
        ValueError: there are several, or none in that line.
    """
    lines = [command.line for command in starts]
    if line is None and len(starts) > 1:
        raise ValueError(
            f"{path} starts {len(starts)} trainings, in lines {', '.join(map(str, lines))}: say which one, such as "
            f"--line {lines[0]}"
        )
    if line is not None and line not in lines:
        raise ValueError(f"{path} starts no training in line {line}, but in {', '.join(map(str, lines))}")
    return 0 if line is None else lines.index(line)


def _program(command: Command) -> int | None:
    """The position of the word that names the training program; None in other commands."""
    texts = [word.text for word in command.words]
    if not any(
        re.search(r"(?:^|/)(?:python[\d.]*|torchrun|accelerate|deepspeed|uv|ray|srun)$", text)
        for text in texts
    ):
        return None
    for index, text in enumerate(texts):
        is_module = index > 0 and texts[index - 1] == "-m"
        if (is_module or text.endswith(".py")) and PROGRAM.search(text):
            return index
    return None


def _settings(command: Command, start: int, path: Path) -> Iterator[Found]:
    name = path.name
    place = f"{name}, line {command.line}"
    if command.environment.get(MODELSCOPE, "").lower() in ("true", "1"):
        yield Found(key=MODELSCOPE, value=True, place=place)
    if PRIME in command.words[start].text:
        yield Found(key="program", value=PRIME, place=place)
    yield from processes_of(command.words[:start], place)
    yield from environment_of(command, command.words[:start], place, path.parent)
    words = iter(command.words[start + 1 :])
    for word in words:
        here = f"{name}, line {word.line}"
        if word.text in ("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd"):
            value = next(words, None)
            yield Found(key=_option_name(word.text), value=value.text if value else "", place=here)
        elif word.text.startswith("--config-"):
            option_name, _, text = word.text.partition("=")
            yield Found(key=_option_name(option_name), value=text, place=here)
        else:
            yield _setting(word, here)


def processes_of(words: Sequence[Word], place: str) -> Iterator[Found]:
    """How many processes torchrun or accelerate is told to start."""
    for word, behind in zip(words, [*words[1:], None], strict=True):
        option = re.match(
            r"^--(nproc[-_]per[-_]node|nnodes|num[-_]processes|num[-_]gpus)(?:=(.*))?$", word.text
        )
        if option is None or (option[2] is None and behind is None):
            continue
        said = word if option[2] is not None or behind is None else behind
        text = said.text if option[2] is None else option[2]
        key = f"torchrun.{option[1].replace('-', '_')}"
        if text.isdigit():
            yield Found(key=key, value=int(text), place=place)
        elif not (said.unresolved or text.startswith("$")):
            yield Found(key=key, value=text, place=place, problem="is no number that is known here")
        else:
            yield Found(
                key=key,
                value=text,
                place=place,
                unresolved=said.unresolved or (text,),
                way_out=way_out(said),
            )


def environment_of(command: Command, before: Sequence[Word], place: str, folder: Path) -> Iterator[Found]:
    """What `ray job submit` is told about the environment of its job, and what libraries read of what is exported.

    Args:
        command: that starts the training.
        before: its words in front of the program.
        place: where it stands.
        folder: of the script, for files that it names.
    """
    for index, word in enumerate(before):
        name, equals, text = word.text.partition("=")
        if name not in ("--runtime-env-json", "--runtime-env"):
            continue
        if not equals:
            text = before[index + 1].text if index + 1 < len(before) else ""
        tree = _runtime_env(text, folder, is_json=name.endswith("json"))
        if isinstance(tree, dict):
            yield from (
                Found(key=f"runtime_env.{key}", value=value, place=place) for key, value in tree.items()
            )
        else:
            yield Found(key="runtime_env", value=text, place=place)
    if exported := [one for one in command.exported if _OF_LIBRARIES.match(one)]:
        yield Found(key="export", value=", ".join(exported), place=place)


def _runtime_env(text: str, folder: Path, *, is_json: bool) -> Any:
    """The tree that Ray is given; None where it cannot be read."""
    try:
        if is_json:
            return json.loads(text)
        path = next(path for path in (Path(text), folder / text) if path.is_file())
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (ValueError, StopIteration, OSError):
        return None


def way_out(word: Word) -> str:
    """What a user can do about a word that is not known."""
    names = list(dict.fromkeys(word.variables))
    if not names:
        return "write the value itself into the script"
    value = word.choices[0] if word.choices else "VALUE"
    give = "".join(f" --set {name}={value if name == names[0] else 'VALUE'}" for name in names)
    loop = f", which is one of {', '.join(word.choices)} in a loop" if word.choices else ""
    return f"give it with --set, for example{give}{loop}"


def _option_name(text: str) -> str:
    return {"-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir"}.get(text, text)


def _setting(word: Word, place: str) -> Found:
    """One word of the command line: key=value, +key=value, ~key, or something else."""
    if word.text in ("$@", "$*", "${@}"):
        return Found(key="$@", value="", place=place)
    read = _OVERRIDE.match(word.text)
    if read is None or (read[3] is None and read[1] != "~"):
        problem = "it is no key=value, so nothing is known about it"
        if word.unresolved:
            problem = f"nothing says what {', '.join(word.unresolved)} stands for; write --set NAME=VALUE"
        return Found(key=word.text, value="", place=place, problem=problem)
    sign, key, rest = read[1], read[2], read[3] or ""
    key = key.replace("/", ".")
    if sign == "~":
        return Found(key=key, value=rest[1:], place=place, kind="reset")
    text = rest[1:]
    if word.unresolved:
        return Found(key=key, value=text, place=place, unresolved=word.unresolved, way_out=way_out(word))
    if word.condition:
        return Found(
            key=key, value=text, place=place, unresolved=(f"line {word.condition}",),
            why="has a condition that is not known here", way_out="set it if it holds",
        )  # fmt: skip
    try:
        value = parse_override(f"key={text}").value
    except ValueError as error:
        return Found(key=key, value=text, place=place, problem=f"the value cannot be read: {error}")
    names_left = tuple(_INTERPOLATION.findall(text))
    return Found(key=key, value=value, place=place, unresolved=names_left, way_out="write the value itself")
