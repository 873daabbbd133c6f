"""TRL from the command line: `trl grpo --model_name_or_path ...`, its scripts with flags, and its YAML files.

Flags are found under the names that the arguments of the trainer, its configuration and LoraConfig have, as the scripts
of TRL hand them on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from strop.compat.migrate.flags import flags_of
from strop.compat.migrate.python_calls import Script, read_calls
from strop.compat.migrate.shell import read_commands
from strop.compat.migrate.shell_words import Command, Word
from strop.compat.migrate.source import Found, processes_of, select_training
from strop.compat.migrate.trl_loop import KINDS
from strop.config.yaml_text import parse
from strop.utils.shell_words import shell_word

_NAMES = {kind.lower(): kind for kind in KINDS}
_SCRIPT = re.compile(rf"(?:^|[./])({'|'.join(_NAMES)})(?:_\w+)?(?:\.py)?$")
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
    starts = [(command, at, kind) for command in commands for at, kind in [_training(command)] if kind]
    own = None if starts else _own_script(commands, path)
    if not starts and own is None:
        raise ValueError(
            f"{path} starts no training of TRL; give a Python script with a trainer (.py), a YAML "
            f"file, or a script with one command such as `trl grpo --model_name_or_path MODEL ...`"
        )
    if own is None:
        beneath = None
        command, at, kind = starts[select_training([command for command, _, _ in starts], path, line)]
    else:
        command, at, file = own
        beneath = read_calls(file, variables, rewards=rewards)
        kind = beneath.kind
    flags = _with_files(flags_of(command, at + 1, path.name), path)
    started = _started(command.words[:at], path.name)
    processes_source, count = _of_accelerate(command.words[:at], path)
    started += [count]
    flags_started = [flag.value for flag in flags if flag.key == "num_processes"]
    script = _script([flag for flag in flags if flag.key not in _LAUNCH], kind)
    if beneath is not None:
        script = _above(beneath, script)
    processes = next((n for n in (*started, *flags_started) if isinstance(n, int)), None)
    return replace(
        script,
        processes=processes,
        folder=command.folder,
        counted_in=processes_source if processes is None else "",
    )


def _own_script(commands: Sequence[Command], path: Path) -> tuple[Command, int, Path] | None:
    """The first command that starts a Python file of the user's own, its position in the command, and the file."""
    for command in commands:
        texts = [word.text for word in command.words]
        for at, text in enumerate(texts):
            places = (Path(text), path.parent / text)
            file = next((place for place in places if text.endswith(".py") and place.is_file()), None)
            if file is not None and any(_STARTS.search(word) for word in texts[:at]):
                return command, at, file
    return None


def _above(script: Script, flags: Script) -> Script:
    """The settings of a Python script with those of its flags, which it takes in place of a configuration."""
    keys = {setting.key for setting in flags.found} | {f"{script.kind}Trainer.**"}
    return replace(
        script, found=(*(setting for setting in script.found if setting.key not in keys), *flags.found)
    )


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
    """The flags behind those of the YAML file that `--config` names."""
    settings: list[Found] = []
    for flag in flags:
        if flag.key != "config":
            continue
        places = [Path(str(flag.value)), script.parent / str(flag.value)]
        file = next((path for path in places if path.is_file()), None)
        if file is None:
            raise ValueError(
                f"{flag.place} names the file {flag.value}, which is not there; give it beside {script}"
            )
        settings += _of_yaml(file)
    return [*settings, *(flag for flag in flags if flag.key != "config")]


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
                location = f"{flags['use_peft'].place}, what TRL assumes with it"
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
    if value_of("eval_strategy", "no") not in ("no", None):
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
