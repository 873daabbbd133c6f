"""TRL from the command line: `trl grpo --model_name_or_path ...`, its scripts with flags, and its YAML files.

Flags are found under the names that the arguments of the trainer, its configuration and LoraConfig have, as the scripts
of TRL hand them on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from strop.compat.migrate.flags import flags_of
from strop.compat.migrate.python_calls import CONDITION, FROM_FLAGS, LATE, Script, read_calls
from strop.compat.migrate.shell import read_commands
from strop.compat.migrate.shell_words import Command, Word
from strop.compat.migrate.source import Found, processes_of, select_training
from strop.compat.migrate.trl_loop import KINDS
from strop.config.yaml_text import parse
from strop.utils.shell_words import shell_word

_NAMES = {kind.lower(): kind for kind in KINDS}
_SCRIPT = re.compile(rf"(?:^|[./])(?:run_)?({'|'.join(_NAMES)})(?:_\w+)?(?:\.py)?$")
_OF_TRL = re.compile(r"(?:^|/)(?:(?:trl|examples)/scripts|open_r1)/")
"""Folders of the scripts of TRL and open-r1, whose every setting is a flag."""
_STARTS = re.compile(r"(?:^|/)(?:python[\d.]*|accelerate|torchrun|deepspeed|uv|srun|ray)$")
_KIND_OF = {
    "reward_funcs": "GRPO",
    "num_generations": "GRPO",
    "max_completion_length": "GRPO",
    "desirable_weight": "KTO",
    "center_rewards_coefficient": "Reward",
    "assistant_only_loss": "SFT",
    "completion_only_loss": "SFT",
    "dataset_text_field": "SFT",
    "packing": "SFT",
    "max_seq_length": "SFT",
    "rpo_alpha": "DPO",
    "precompute_ref_log_probs": "DPO",
}
"""Names in a YAML file that one kind of training has, the first that is there counts."""
_MODEL = {
    "model_revision": "revision",
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "trust_remote_code": "trust_remote_code",
    "attn_implementation": "attn_implementation",
}
"""Flags of the model, and the arguments of from_pretrained that they become."""
_LORA = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_task_type": "task_type",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "lora_target_parameters": "target_parameters",
}
_ADAPTER_OF_FLAGS = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""Settings of an adapter that TRL's ModelConfig assumes."""
_ASSUMED = ", what TRL assumes with it"
_LAUNCH = ("num_processes", "accelerate_config")
"""Flags by which `trl` starts processes."""
_DATA = (
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "datasets", "dataset_mixture",
    "test_split_size", "streaming",
)  # fmt: skip


def read_trl(path: Path, variables: Mapping[str, str], *, rewards: Path, line: int | None = None) -> Script:
    """The settings of a training with TRL: a Python script, a launch script with flags, or a YAML file.

    Args:
        path: of the file.
        variables: values of variables that it asks for.
        rewards: the file that reward functions of a Python script may be copied into.
        line: of the training in a launch script that starts several.

    Raises:
        ValueError: the file cannot be read as what it is, or trains nothing that strop knows.
        OSError: it cannot be read.
    """
    if path.suffix in (".yaml", ".yml"):
        flags = _of_yaml(path)
        names = {flag.key for flag in flags}
        kind = next((kind for name, kind in _KIND_OF.items() if name in names), "")
        if not kind:
            raise ValueError(
                f"{path} does not say which training it is for: give the script with the command, such as `trl sft "
                f"--config {shell_word(path)}`"
            )
        return _script(flags, kind)
    if path.suffix == ".py":
        return read_calls(path, variables, rewards=rewards)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    commands = read_commands(text, variables, path=str(path))
    starts = _starts(commands, path, variables, rewards)
    if not starts:
        raise ValueError(
            f"{path} starts no training of TRL; give a Python script with a trainer (.py), a YAML "
            f"file, or a script with one command such as `trl grpo --model_name_or_path MODEL ...`"
        )
    start = starts[select_training([start.command for start in starts], path, line)]
    command, at, beneath = start.command, start.at, start.beneath
    flags = _with_files(flags_of(command, at + 1, path.name), path)
    started = _started(command.words[:at], path.name)
    processes_source, count = _of_accelerate(command.words[:at], path)
    started += [count]
    flags_started = [flag.value for flag in flags if flag.key == "num_processes"]
    script = _script([flag for flag in flags if flag.key not in _LAUNCH], start.kind)
    if beneath is not None:
        script = _above(beneath, script)
    processes = next((n for n in (*started, *flags_started) if isinstance(n, int)), None)
    return replace(
        script,
        processes=processes,
        folder=command.folder,
        counted_in=processes_source if processes is None else "",
    )


@dataclass(frozen=True, kw_only=True)
class _Start:
    """A training that a command starts."""

    command: Command
    at: int
    """Position of the word that names it."""
    kind: str
    beneath: Script | None = None
    """Settings of the Python file that it starts; None of TRL's own scripts."""


def _starts(
    commands: Sequence[Command], path: Path, variables: Mapping[str, str], rewards: Path
) -> list[_Start]:
    """Trainings that commands start: each by a Python file that is there and makes a trainer, or by TRL.

    Raises:
        ValueError: there are none, and a Python file that is there cannot be read as one.
    """
    starts: list[_Start] = []
    problems: list[ValueError] = []
    for command in commands:
        at, kind = _training(command)
        start = _Start(command=command, at=at, kind=kind) if kind else None
        for own_at, file in _own_files(command, path):
            try:
                beneath = read_calls(file, variables, rewards=rewards)
            except ValueError as error:
                problems.append(error)
            else:
                start = _Start(command=command, at=own_at, kind=beneath.kind, beneath=beneath)
                break
        starts += [start] if start else []
    if problems and not starts:
        raise problems[-1]
    return starts


def _own_files(command: Command, path: Path) -> Iterator[tuple[int, Path]]:
    """Python files of the user's own in a command that starts one, with their positions in it."""
    texts = [word.text for word in command.words]
    for at, text in enumerate(texts):
        if text.endswith(".py") and not _OF_TRL.search(text) and any(map(_STARTS.search, texts[:at])):
            files = (place for place in (Path(text), path.parent / text) if place.is_file())
            yield from ((at, file) for file in list(files)[:1])


def _above(script: Script, flags: Script) -> Script:
    """The settings of a Python script, with those of its flags in place of a configuration and of values that it does
    not have itself."""
    data = {f"{script.kind}Trainer.{name}" for name in ("train_dataset", "eval_dataset")}
    own = {
        setting.key
        for setting in script.found
        if setting.problem != FROM_FLAGS
        and (not setting.unresolved or setting.reason in (CONDITION, LATE) or setting.key in data)
    }
    if own & data:
        own |= data  # which rows are those of validation is the script's business
    has_adapter = any(setting.key.startswith("LoraConfig.") for setting in script.found)
    unknown = {setting.key for setting in script.found} - own
    given = [
        flag
        for flag in flags.found
        if flag.key not in own
        and (
            not has_adapter
            or not flag.key.startswith("LoraConfig.")
            or (flag.key in unknown and not flag.place.endswith(_ASSUMED))
        )
    ]
    replaced = {flag.key for flag in given}
    rest = [
        setting
        for setting in script.found
        if setting.key not in replaced
        and (setting.problem != FROM_FLAGS or setting.key in (*own, f"{script.kind}Trainer.train_dataset"))
    ]
    return replace(script, found=(*rest, *given))


def _started(words: Sequence[Word], name: str) -> list[int | None]:
    """Numbers of processes that a launcher starts: torchrun and deepspeed by machine, accelerate in all."""
    counts = {
        option.key.partition(".")[2]: option.value
        for option in processes_of(words, name)
        if isinstance(option.value, int)
    }
    nodes = counts.get("nnodes", 1)
    per_node = next((counts[option] for option in ("nproc_per_node", "num_gpus") if option in counts), None)
    return [counts.get("num_processes"), None if per_node is None else per_node * nodes]


def _of_accelerate(words: Sequence[Word], script: Path) -> tuple[str, int | None]:
    """(the file that `accelerate launch --config_file` names, its number of processes, where it is there)."""
    texts = [part for word in words for part in word.text.split("=", 1)]
    name = next((name for option, name in pairwise(texts) if option == "--config_file"), "")
    file = next((path for path in (Path(name), script.parent / name) if name and path.is_file()), None)
    tree = None if file is None else parse(file.read_text(encoding="utf-8"), str(file))
    count = tree.get("num_processes") if isinstance(tree, dict) else None
    return name, count if isinstance(count, int) else None


def _training(command: Command) -> tuple[int, str]:
    """Position and kind of the training that a command starts; no kind in other commands."""
    texts = [word.text for word in command.words]
    for at, text in enumerate(texts):
        if at and texts[at - 1].rpartition("/")[2] == "trl" and text in _NAMES:
            return at, _NAMES[text]
        is_program = text.endswith(".py") or (at and texts[at - 1] == "-m")
        if (
            is_program
            and any(_STARTS.search(word) for word in texts[:at])
            and (match := _SCRIPT.search(text))
        ):
            return at, _NAMES[match[1]]
    return 0, ""


def _of_yaml(path: Path) -> list[Found]:
    tree = parse(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds {tree!r:.60}, but a configuration is a mapping of names to values")
    return [Found(key=str(name), value=value, place=path.name) for name, value in tree.items()]


def _with_files(flags: Sequence[Found], script: Path) -> list[Found]:
    """The flags behind those of the YAML file that `--config` names, or a word by itself, as for alignment-handbook."""
    settings: list[Found] = []
    rest: list[Found] = []
    for flag in flags:
        is_file = bool(flag.problem) and flag.key.endswith((".yaml", ".yml"))
        if flag.key != "config" and not is_file:
            rest.append(flag)
            continue
        name = flag.key if is_file else str(flag.value)
        file = next((path for path in (Path(name), script.parent / name) if path.is_file()), None)
        if file is None:
            raise ValueError(
                f"{flag.place} names the file {name}, which is not there; give it beside {script}"
            )
        settings += _of_yaml(file)
    return [*settings, *rest]


def _script(flags: Sequence[Found], kind: str) -> Script:
    return Script(found=tuple(_arguments({flag.key: flag for flag in flags}, kind)), kind=kind)


def _arguments(flags: Mapping[str, Found], kind: str) -> Iterator[Found]:
    """Flags as arguments of the trainer, its configuration and LoraConfig."""
    config, trainer = f"{kind}Config", f"{kind}Trainer"
    flags = {flag.key: flag for flag in map(_switched_off, flags.values())}
    model = {_MODEL[name]: flag.value for name, flag in flags.items() if name in _MODEL}
    has_adapter = "use_peft" in flags and flags["use_peft"].value is not False
    for name, flag in flags.items():
        if name == "model_name_or_path":
            yield replace(flag, key=f"{trainer}.model", written=name)
        elif name in _MODEL or name in _DATA or name == "use_peft":
            continue
        elif name in _LORA:
            if has_adapter:
                yield replace(flag, key=f"LoraConfig.{_LORA[name]}", written=name)
        elif name == "reward_funcs":
            parts = flag.value if isinstance(flag.value, list) else [flag.value]
            yield replace(flag, key=f"{trainer}.reward_funcs", value=[_reward(str(part)) for part in parts])
        elif name == "reward_model_name_or_path":
            yield replace(flag, key=f"{trainer}.reward_funcs", value=[{"from": "model", "path": flag.value}])
        else:
            yield replace(flag, key=f"{config}.{name}", written=name)
    if has_adapter:
        for name, value in _ADAPTER_OF_FLAGS.items():
            if name not in flags:
                location = f"{flags['use_peft'].place}{_ASSUMED}"
                yield Found(key=f"LoraConfig.{_LORA[name]}", value=value, place=location, written=name)
    if model:
        location = next(flag.place for name, flag in flags.items() if name in _MODEL)
        yield Found(key=f"{config}.model_init_kwargs", value=model, place=location)
    yield from _data(flags, kind)


def _switched_off(flag: Found) -> Found:
    """`--no_NAME`, which the parser of transformers has for every switch that is on, as NAME=False."""
    if not flag.key.startswith("no_") or flag.value is not True or flag.key == "no_cuda":
        return flag
    return replace(flag, key=flag.key.removeprefix("no_"), value=False)


def _data(flags: Mapping[str, Found], kind: str) -> Iterator[Found]:
    """The data set by its name and its splits, or several in one."""
    trainer, config = f"{kind}Trainer", f"{kind}Config"
    for name in ("datasets", "dataset_mixture"):
        if name in flags:
            yield from _mixture(flags, name, trainer, config)
            return
    if "dataset_name" not in flags:
        return
    dataset = flags["dataset_name"]

    def value_of(name: str, otherwise: str | None) -> Any:
        return flags[name].value if name in flags else otherwise

    rows = {"path": dataset.value, "name": value_of("dataset_config", None), "data_files": None, "steps": []}
    train = {**rows, "split": value_of("dataset_train_split", "train")}
    yield replace(dataset, key=f"{trainer}.train_dataset", value=train, written="dataset_name")
    if value_of("eval_strategy", value_of("evaluation_strategy", "no")) not in ("no", None):
        test = {**rows, "split": value_of("dataset_test_split", "test")}
        yield replace(dataset, key=f"{trainer}.eval_dataset", value=test, written="dataset_test_split")


def _mixture(flags: Mapping[str, Found], name: str, trainer: str, config: str) -> Iterator[Found]:
    """TRL's `datasets`, or `dataset_mixture` of open-r1, which has a share of the rows of each data set."""
    flag = flags[name]
    mixture = flag.value if name == "dataset_mixture" else {"datasets": flag.value}
    sets = mixture.get("datasets") if isinstance(mixture, Mapping) else None
    if not isinstance(sets, list) or not all(isinstance(part, Mapping) for part in sets):
        yield replace(
            flag,
            key=f"{trainer}.train_dataset",
            written=name,
            problem="it is no list of data sets with their names",
        )
        return
    parts = [
        {
            "path": part.get("path") or part.get("id"),
            "name": part.get("name") or part.get("config"),
            "data_files": part.get("data_files"),
            "split": part.get("split") or "train",
            "steps": [],
            "weight": part.get("weight"),
        }
        for part in sets
    ]
    yield replace(flag, key=f"{trainer}.train_dataset", value={"parts": parts}, written=name)
    size = mixture.get("test_split_size") if name == "dataset_mixture" else None
    if size is None and "test_split_size" in flags:
        size = flags["test_split_size"].value
    if size is not None:
        yield replace(flag, key=f"{config}.test_split_size", value=size, written="test_split_size")
    if "streaming" in flags:
        yield replace(flags["streaming"], key=f"{config}.dataset_streaming", written="streaming")


def _reward(text: str) -> dict[str, Any]:
    """A reward by its name in TRL, or by that of a function in a module."""
    module, _, name = text.rpartition(".")
    return {"from": "module", "module": module or "trl.rewards", "name": name, "folder": "."}
