"""The settings in a Python script that trains with TRL: keyword arguments, read from its syntax and never executed.

Read are literal values, and names that the script gives one literal value. What else stands there (a call, a
computation, an argument of the command line) is reported as it is written.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.compat.migrate.python_datasets import is_of_flags, read_dataset
from strop.compat.migrate.python_names import (
    CONFIGS,
    FUNCTIONS,
    LONGEST_CHAIN,
    ScriptNames,
    is_main,
    last_name,
)
from strop.compat.migrate.python_values import copied_functions
from strop.compat.migrate.shell_words import Word
from strop.compat.migrate.source import Found
from strop.compat.migrate.trl_loop import COMMANDS

TRAINERS = {
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "RLOOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "SFTTrainer": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "PPOTrainer": (
        "args",
        "processing_class",
        "model",
        "ref_model",
        "reward_model",
        "train_dataset",
        "value_model",
    ),
    "DPOTrainer": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "KTOTrainer": ("model", "ref_model", "args"),
    "RewardTrainer": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
}
"""Trainers, and the names of their arguments by position."""
OTHER_TRAINERS: Mapping[str, str] = {
    "ORPOTrainer": "write `strop dpo` with prefer.loss=orpo",
    "CPOTrainer": "with loss_type=simpo it is `strop dpo` with prefer.loss=simpo, else there is no counterpart",
    "GKDTrainer": (
        "with lmbda=1 it is `strop train` with algorithm=on_policy_distillation; with lmbda=0 and beta=0, on fixed "
        "answers, `strop generate --top-logprobs` and `strop sft` with sft.distillation.coef; answers of both kinds in "
        "one run have no counterpart"
    ),
    "BCOTrainer": "",
    "OnlineDPOTrainer": "",
}
"""Trainers whose arguments are not translated, and what to write instead; empty where there is no counterpart."""

_MODELS = ("model", "ref_model", "reward_model", "value_model", "policy", "ref_policy")
_PLACED = ("to", "cuda", "cpu", "train", "eval", "half", "float", "bfloat16", "requires_grad_")
"""Methods of a loaded model that do not make it another one."""
_MODEL_NAMES = ("pretrained_model_name_or_path", "model_name")
_DATA = {"train_dataset": "train_files", "eval_dataset": "val_files"}
_REASON, _WAY_OUT = "is no literal value", "write the number or text itself, or set our key afterwards"
FROM_FLAGS = (
    "its settings come from elsewhere, such as flags: give the launch script that has them, or write the configuration "
    "out, as in GRPOConfig(learning_rate=1e-6)"
)
CONDITION = "stands under a condition"
LATE = "is assigned when the trainer has been made, which may have read it before"


@dataclass(frozen=True, kw_only=True)
class Script:
    """Settings of a script."""

    found: tuple[Found, ...]
    kind: str
    """One of strop.compat.migrate.trl_loop.KINDS."""
    processes: int | None = None
    """Number of processes it is started with; None where nothing says so."""
    counted_in: str = ""
    """File of accelerate that says it and is not there; empty where there is none."""
    copied: str = ""
    """Text of the file for its reward functions; empty where they are loaded from where they are."""
    folder: Word | None = None
    """Folder that a launch script has changed to before the training; None where it has not."""


def read_calls(
    path: Path, variables: Mapping[str, str] | None = None, *, rewards: Path | None = None
) -> Script:
    """The settings of the one training in a script.

    Args:
        path: of the script.
        variables: values of environment variables that it asks for.
        rewards: the file that its reward functions may be copied into, where the script itself cannot be loaded.

    Raises:
        ValueError: it is no Python, or trains nothing that strop knows, or several things.
        OSError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path))
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"{path}{line} is not Python: {getattr(error, 'msg', error)}") from error
    reader = _Reader(tree, text, path, variables or {}, rewards)
    kinds = {name.removesuffix("Trainer").removesuffix("Config") for name, _ in reader.calls}
    other_trainers = sorted(
        {last_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        & OTHER_TRAINERS.keys()
    )
    if not kinds:
        trainers = ", ".join(TRAINERS)
        reason = (
            (OTHER_TRAINERS[other_trainers[0]] or "there is no counterpart here") if other_trainers else ""
        )
        instead = (
            f"it uses {other_trainers[0]}, which is not translated: {reason}; " if other_trainers else ""
        )
        raise ValueError(f"{path} makes no trainer that strop knows: {instead}known are {trainers}")
    if len(kinds) > 1:
        raise ValueError(
            f"{path} trains in several ways ({', '.join(sorted(kinds))}): copy the one to migrate into a file of "
            f"its own"
        )
    return Script(found=tuple(reader.settings()), kind=kinds.pop(), copied=reader.copied)


class _Reader:
    """The settings of a parsed script."""

    def __init__(
        self,
        tree: ast.Module,
        text: str,
        path: Path,
        variables: Mapping[str, str],
        rewards: Path | None,
    ) -> None:
        self.tree, self.text, self.path, self.rewards = tree, text, path, rewards
        self.names = ScriptNames(tree, variables)
        self.copied = ""
        self.rewards_in_script: list[str] = []
        """Names of its reward functions."""
        self.calls = [
            (last_name(node.func), node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and last_name(node.func) in (*CONFIGS, *TRAINERS)
        ]
        self.arguments = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and last_name(node.func) == "TrainingArguments"
        ]
        """Calls of TrainingArguments, which trainers of 2023 and 2024 take in place of a configuration of their own."""

        self.has_configuration = bool(self.arguments) or any(name in CONFIGS for name, _ in self.calls)
        """Arguments of a configuration stand in the script."""

    def settings(self) -> Iterator[Found]:
        """Every argument of the configuration, of the trainer and of an adapter, in the order of their lines."""
        adapters = [
            ("LoraConfig", node)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and _is_adapter(node)
        ]
        kind = next((name.removesuffix("Trainer") for name, _ in self.calls if name in TRAINERS), "")
        older = [(f"{kind}Config", node) for node in self.arguments if kind]
        for _, call in older:
            yield from self._differing_defaults(f"{kind}Config", call)
        for _, call in adapters:
            yield from self._assumed_of_adapter(call)
        for name, call in sorted((*self.calls, *older, *adapters), key=lambda pair: pair[1].lineno):
            for position, node in enumerate([] if name == "LoraConfig" else call.args):
                names = TRAINERS.get(name, ("output_dir",))
                argument = names[position] if position < len(names) else f"argument {position + 1}"
                yield self._setting(name, argument, node)
                yield from self._loading_arguments(name, argument, node)
            for keyword in call.keywords:
                if keyword.arg is None:
                    yield Found(
                        key=f"{name}.**", value=ast.unparse(keyword.value), place=self._place(keyword.value),
                        problem="settings from a dictionary cannot be read: write them as keyword arguments",
                    )  # fmt: skip
                else:
                    yield self._setting(name, keyword.arg, keyword.value)
                    yield from self._loading_arguments(name, keyword.arg, keyword.value)
        yield from self._set_afterwards(kind)

    def _assumed_of_adapter(self, call: ast.Call) -> Iterator[Found]:
        """Rank and alpha that PEFT assumes, and Unsloth."""
        alpha = 8 if last_name(call.func) == "LoraConfig" else 16
        arguments = {keyword.arg for keyword in call.keywords}
        for argument, value in (("r", 8), ("lora_alpha", alpha)):
            if None not in arguments and argument not in arguments:
                location = f"{self._place(call)}, what {last_name(call.func)} assumes"
                yield Found(key=f"LoraConfig.{argument}", value=value, place=location)

    def _set_afterwards(self, kind: str) -> Iterator[Found]:
        """Arguments of the configuration that are assigned to it after it was made: `args.beta = 0.1`."""
        trainers = [(name, call) for name, call in self.calls if name in TRAINERS]
        held = {
            node.id
            for name, call in trainers
            for argument, node in (
                *zip(TRAINERS[name], call.args, strict=False),
                *((keyword.arg, keyword.value) for keyword in call.keywords),
            )
            if argument == "args" and isinstance(node, ast.Name)
        }
        assigned = [node for node in ast.walk(self.tree) if isinstance(node, ast.Assign)]
        for node in sorted(assigned, key=lambda one: one.lineno):
            match node.targets:
                case [ast.Attribute(value=ast.Name(id=name), attr=argument)] if name in held:
                    setting = self._setting(f"{kind}Config", argument, node.value)
                    if id(node) not in self.names.bodies:
                        text = ast.unparse(node)
                        setting = replace(setting, unresolved=(text,), reason=CONDITION, way_out=_WAY_OUT)
                    yield setting
                case [ast.Attribute(value=ast.Attribute(value=trainer, attr="args"), attr=argument)] if (
                    self.names.resolved(trainer) in [call for _, call in trainers]
                ):
                    setting = self._setting(f"{kind}Config", argument, node.value)
                    text = ast.unparse(node)
                    yield replace(setting, unresolved=(text,), reason=LATE, way_out=_WAY_OUT)

    def _differing_defaults(self, name: str, call: ast.Call) -> Iterator[Found]:
        """Defaults of TrainingArguments that differ from those of TRL's configurations."""
        arguments = {keyword.arg for keyword in call.keywords}
        for argument, value in (("learning_rate", 5e-5), ("gradient_checkpointing", False)):
            if argument not in arguments:
                location = f"{self._place(call)}, what TrainingArguments assumes"
                yield Found(key=f"{name}.{argument}", value=value, place=location)

    def _setting(self, name: str, argument: str, node: ast.expr) -> Found:
        key, location = f"{name}.{argument}", self._place(node)
        if argument == "reward_funcs":
            return Found(key=key, value=self._rewards(node), place=location)
        node = self._model(node) if argument in _MODELS else self.names.resolved(node)
        if argument in ("args", "config", "peft_config") and isinstance(node, ast.Call | ast.Name):
            text = ast.unparse(node)
            if argument == "args" and isinstance(node, ast.Name) and not self.has_configuration:
                return Found(key=f"{name}.**", value=text, place=location, problem=FROM_FLAGS)
            return Found(key=key, value=text, place=location)
        if argument in _DATA:
            dataset = read_dataset(node, self.names)
            if dataset is not None:
                return Found(key=key, value=dataset, place=location)
            if is_of_flags(node, self.names):
                return Found(key=key, value=ast.unparse(node), place=location, problem=FROM_FLAGS)
        if (
            argument in _MODELS
            and isinstance(node, ast.Call)
            and last_name(node.func) == "from_pretrained"
            and (
                models := [
                    *node.args,
                    *(keyword.value for keyword in node.keywords if keyword.arg in _MODEL_NAMES),
                ]
            )
        ):
            node = self.names.resolved(models[0])
        try:
            return Found(key=key, value=self.names.literal(node), place=location)
        except ValueError:
            text, way_out = ast.unparse(node), _WAY_OUT
            if argument in _DATA:
                section = COMMANDS.get(name.removesuffix("Trainer"), "")
                ours = f"{section}.data.{_DATA[argument]}".removeprefix(".")
                way_out = f"write load_dataset(...) with the values themselves, or set {ours}"
            return Found(
                key=key, value=text, place=location, unresolved=(text,), reason=_REASON, way_out=way_out
            )

    def _model(self, node: ast.expr) -> ast.expr:
        """The expression that loads a model, below what only places it or puts an adapter on it."""
        for _ in range(LONGEST_CHAIN):
            match node := self.names.resolved(node):
                case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in _PLACED:
                    node = inner
                case ast.Call(args=[inner, *_]) if last_name(node.func) in (
                    "get_peft_model",
                    "prepare_model_for_kbit_training",
                ):
                    node = inner
                case _:
                    break
        return node

    def _loading_arguments(self, name: str, argument: str, node: ast.expr) -> Iterator[Found]:
        """Arguments of the policy's `from_pretrained` beside the folder, as arguments of TRL's own loading."""
        call = self._model(node)
        if argument != "model" or not isinstance(call, ast.Call) or last_name(call.func) != "from_pretrained":
            return
        arguments: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is not None and keyword.arg not in (*_MODEL_NAMES, "num_labels"):
                try:
                    arguments[keyword.arg] = self.names.literal(keyword.value)
                except ValueError:
                    arguments[keyword.arg] = ast.unparse(keyword.value)
        if arguments:
            key = f"{name.removesuffix('Trainer')}Config.model_init_kwargs"
            yield Found(key=key, value=arguments, place=self._place(call), written="from_pretrained")

    def _rewards(self, node: ast.expr) -> list[dict[str, Any]]:
        node = self.names.resolved(node)
        items = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        self.rewards_in_script = [
            item.id for item in items if isinstance(item, ast.Name) and item.id in self.names.functions
        ]
        return [self._reward(item) for item in items]

    def _reward(self, node: ast.expr) -> dict[str, Any]:
        """Source of a reward."""
        if isinstance(node, ast.Name) and node.id in self.names.imported:
            module, name = self.names.imported[node.id]
            return {"from": "module", "module": module, "name": name, "folder": str(self.path.parent)}
        if isinstance(node, ast.Name) and node.id in self.names.functions:
            why_not = self._load_obstacle()
            if why_not and self.rewards is not None:
                self.copied = copied_functions(self.tree, self.text, self.rewards_in_script)
            if self.copied:
                return {"from": "copy", "path": str(self.rewards), "name": node.id}
            return {"from": "script", "path": str(self.path), "name": node.id, "why_not": why_not}
        followed = self.names.resolved(node)
        if isinstance(followed, ast.Constant) and isinstance(followed.value, str):
            return {"from": "model", "path": followed.value}
        return {"from": "expression", "text": ast.unparse(node)}

    def _load_obstacle(self) -> str:
        """Reason for which the script cannot be loaded for a function in it: it would start the training, or needs
        TRL."""
        run = [
            node
            for node in self.tree.body
            if not isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not is_main(node)
        ]
        calls = {
            last_name(inner.func) for node in run for inner in ast.walk(node) if isinstance(inner, ast.Call)
        }
        if calls & {*TRAINERS, *self.names.functions, "train"}:
            return "would start the training in it"
        imports = [node for node in run if isinstance(node, ast.ImportFrom) and node.module]
        modules = {str(node.module) for node in imports}
        modules |= {alias.name for node in run if isinstance(node, ast.Import) for alias in node.names}
        needs_trl = "trl" in {module.partition(".")[0] for module in modules}
        return "needs trl, which it imports" if needs_trl else ""

    def _place(self, node: ast.AST) -> str:
        return f"{self.path.name}, line {getattr(node, 'lineno', 0)}"


def _is_adapter(node: ast.Call) -> bool:
    """LoraConfig(...), or what has its arguments: FastLanguageModel.get_peft_model(model, r=...)."""
    name = last_name(node.func)
    return name == "LoraConfig" or (
        name == "get_peft_model" and any(keyword.arg == "r" for keyword in node.keywords)
    )
