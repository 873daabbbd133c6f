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
    """Setting of a script or a YAML file."""

    key: str
    """Full key, with dots."""
    value: Any
    """Plain value; as text where it could not be read or filled in."""
    place: str
    """`run.sh, line 12` or the name of a YAML file."""
    written: str = ""
    """Key as it is written there, where its row has another name."""
    kind: Literal["set", "reset"] = "set"
    unresolved: tuple[str, ...] = ()
    """Names in the value whose values are not known."""
    reason: str = "is not set in what was given"
    """Reason for which they have no value."""
    way_out: str = ""
    """Remedy for the user."""
    problem: str = ""
    """Reason for which the setting could not be read at all."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """All settings of the given files, and the program they are for."""

    found: tuple[Found, ...]
    is_sft: bool = False
    """Supervised fine-tuning rather than reinforcement learning."""
    folder: Word | None = None
    """Folder that the script has changed to before the training; None where it has not."""


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
    all_settings: list[Found] = []
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
            all_settings.extend(_leaves(tree, "", path.name))
        else:
            command, start = _training(text, path, variables, line)
            folder = command.folder
            is_sft = is_sft or "sft" in command.words[start].text
            settings = list(_settings(command, start, path))
            for config_file in _named_files(settings, path, files):
                all_settings.extend(
                    _leaves(_tree(config_file.read_text(encoding="utf-8"), config_file), "", config_file.name)
                )
                trees.add(config_file.stem)
            all_settings.extend(settings)
    resolved = _interpolated([_with_given(setting, trees) for setting in all_settings])
    return Source(found=tuple(resolved), is_sft=is_sft, folder=folder)


def _interpolated(settings: Sequence[Found]) -> Iterator[Found]:
    """Settings with ${other.key} in their values replaced, where that key has a value of its own."""
    values = {
        setting.key: setting.value
        for setting in settings
        if setting.kind == "set" and not setting.unresolved and not setting.problem
    }
    for setting in settings:
        names = {name: name[2:-1] for name in setting.unresolved}
        if (
            not setting.unresolved
            or not isinstance(setting.value, str)
            or not set(names.values()) <= values.keys()
        ):
            yield setting
            continue
        value: Any = setting.value
        for name, key in names.items():
            value = values[key] if value == name else str(value).replace(name, str(values[key]))
        yield dataclasses.replace(setting, value=value, unresolved=())


def _with_given(setting: Found, trees: Collection[str]) -> Found:
    """The name of a configuration file with a mark, where that file is among those that are read."""
    is_given = setting.key == "--config-name" and str(setting.value).removesuffix(".yaml") in trees
    return dataclasses.replace(setting, value=f"{setting.value}{GIVEN}") if is_given else setting


def _named_files(settings: Sequence[Found], script: Path, files: Sequence[Path]) -> list[Path]:
    """Configuration files that a script names by --config-path and --config-name and that are there, those that they
    build on first; none where one of that name is among `files`."""
    options = {setting.key: str(setting.value) for setting in settings if setting.key.startswith("--config-")}
    name = options.get("--config-name", "").removesuffix(".yaml")
    folder_name = options.get("--config-path") or options.get("--config-dir") or "."
    if not name or any(path.stem == name for path in files):
        return []
    for folder in (Path(folder_name), script.parent / folder_name):
        if (folder / f"{name}.yaml").is_file():
            return _with_bases(folder / f"{name}.yaml", [])
    return []


def _with_bases(path: Path, ancestors: Sequence[Path]) -> list[Path]:
    """A configuration file behind those of its folder that its `defaults` name."""
    tree = _tree(path.read_text(encoding="utf-8"), path)
    names = [name for name in tree.get("defaults") or [] if isinstance(name, str) and name != "_self_"]
    bases = [path.with_name(f"{name.removesuffix('.yaml')}.yaml") for name in names]
    chosen = [base for base in bases if base.is_file() and base not in (*ancestors, path)]
    return [*(name for base in chosen for name in _with_bases(base, (*ancestors, path))), path]


def _tree(text: str, path: Path) -> dict[str, Any]:
    tree = parse(text, str(path))
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds {tree!r:.60}, but a configuration is a mapping of keys to values")
    return tree


def _leaves(tree: Mapping[Any, Any], prefix: str, location: str) -> Iterator[Found]:
    """Each value of a nested tree under its full key; an empty mapping is a value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.", location)
            continue
        names = tuple(_INTERPOLATION.findall(str(value))) if "${" in str(value) else ()
        yield Found(
            key=key,
            value=value,
            place=location,
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
    return starts[select_training([command for command, _ in starts], path, line)]


def select_training(starts: Sequence[Command], path: Path, line: int | None) -> int:
    """Index of the training that is meant among those that a script starts.

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
    location = f"{name}, line {command.line}"
    if command.environment.get(MODELSCOPE, "").lower() in ("true", "1"):
        yield Found(key=MODELSCOPE, value=True, place=location)
    if PRIME in command.words[start].text:
        yield Found(key="program", value=PRIME, place=location)
    yield from processes_of(command.words[:start], location)
    yield from environment_of(command, command.words[:start], location, path.parent)
    words = iter(command.words[start + 1 :])
    for word in words:
        word_location = f"{name}, line {word.line}"
        if word.text in ("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd"):
            value = next(words, None)
            yield Found(key=_option_name(word.text), value=value.text if value else "", place=word_location)
        elif word.text.startswith("--config-"):
            option_name, _, text = word.text.partition("=")
            yield Found(key=_option_name(option_name), value=text, place=word_location)
        else:
            yield _setting(word, word_location)


def processes_of(words: Sequence[Word], location: str) -> Iterator[Found]:
    """Numbers of processes in the arguments of torchrun or accelerate."""
    for word, behind in zip(words, [*words[1:], None], strict=True):
        option = re.match(
            r"^--(nproc[-_]per[-_]node|nnodes|num[-_]processes|num[-_]gpus)(?:=(.*))?$", word.text
        )
        if option is None or (option[2] is None and behind is None):
            continue
        number = word if option[2] is not None or behind is None else behind
        text = number.text if option[2] is None else option[2]
        key = f"torchrun.{option[1].replace('-', '_')}"
        if text.isdigit():
            yield Found(key=key, value=int(text), place=location)
        elif not (number.unresolved or text.startswith("$")):
            yield Found(key=key, value=text, place=location, problem="is no number that is known here")
        else:
            yield Found(
                key=key,
                value=text,
                place=location,
                unresolved=number.unresolved or (text,),
                way_out=way_out(number),
            )


def environment_of(command: Command, before: Sequence[Word], location: str, folder: Path) -> Iterator[Found]:
    """Environment of the job of `ray job submit`, and exported variables that libraries read.

    Args:
        command: that starts the training.
        before: its words in front of the program.
        location: of the command, for messages.
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
                Found(key=f"runtime_env.{key}", value=value, place=location) for key, value in tree.items()
            )
        else:
            yield Found(key="runtime_env", value=text, place=location)
    if exported := [
        name_exported for name_exported in command.exported if _OF_LIBRARIES.match(name_exported)
    ]:
        yield Found(key="export", value=", ".join(exported), place=location)


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
    """Remedy for a word that is not known."""
    names = list(dict.fromkeys(word.variables))
    if not names:
        return "write the value itself into the script"
    value = word.choices[0] if word.choices else "VALUE"
    give = "".join(f" --set {name}={value if name == names[0] else 'VALUE'}" for name in names)
    loop = f", which is one of {', '.join(word.choices)} in a loop" if word.choices else ""
    return f"give it with --set, for example{give}{loop}"


def _option_name(text: str) -> str:
    return {"-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir"}.get(text, text)


def _setting(word: Word, location: str) -> Found:
    """One word of the command line: key=value, +key=value, ~key, or something else."""
    if word.text in ("$@", "$*", "${@}"):
        return Found(key="$@", value="", place=location)
    match = _OVERRIDE.match(word.text)
    if match is None or (match[3] is None and match[1] != "~"):
        problem = "it is no key=value, so nothing is known about it"
        if word.unresolved:
            problem = f"nothing says what {', '.join(word.unresolved)} stands for; write --set NAME=VALUE"
        return Found(key=word.text, value="", place=location, problem=problem)
    sign, key, rest = match[1], match[2], match[3] or ""
    key = key.replace("/", ".")
    if sign == "~":
        return Found(key=key, value=rest[1:], place=location, kind="reset")
    text = rest[1:]
    if word.unresolved:
        return Found(key=key, value=text, place=location, unresolved=word.unresolved, way_out=way_out(word))
    if word.condition:
        return Found(
            key=key, value=text, place=location, unresolved=(f"line {word.condition}",),
            reason="has a condition that is not known here", way_out="set it if it holds",
        )  # fmt: skip
    try:
        value = parse_override(f"key={text}").value
    except ValueError as error:
        return Found(key=key, value=text, place=location, problem=f"the value cannot be read: {error}")
    names_left = tuple(_INTERPOLATION.findall(text))
    return Found(
        key=key, value=value, place=location, unresolved=names_left, way_out="write the value itself"
    )
