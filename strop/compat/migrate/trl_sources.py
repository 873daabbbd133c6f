"""Inputs of a TRL trainer: rewards, data sets, and the loading of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from strop.compat.migrate.result import Facts, Outcome, UnreadableError, many, number, refuse, skip
from strop.compat.migrate.rules import attention, model_path
from strop.compat.migrate.trl_loop import argument
from strop.data.mixture import entry_names


def rewards(key: str, value: Any, facts: Facts) -> Outcome:
    """Reward functions and reward models, with their weights."""
    parts = value if isinstance(value, list) else [value]
    if text := next((part.get("text") for part in parts if part.get("from") == "expression"), None):
        raise UnreadableError(
            f"{text} is neither a function of this script nor an imported one: set reward.path"
        )
    weights = argument(facts, "reward_weights") or [1.0] * len(parts)
    if len(weights) != len(parts):
        raise UnreadableError(
            f"{len(parts)} rewards, and {len(weights)} reward_weights: set reward.functions"
        )
    weighed = list(zip(parts, weights, strict=True))
    models = [(part["path"], weight) for part, weight in weighed if part["from"] == "model"]
    functions = [(part, weight) for part, weight in weighed if part["from"] != "model"]
    if len(models) > 1 or any(weight != 1 for _, weight in models):
        names = ", ".join(str(path) for path, _ in models)
        return refuse(
            f"strop has one reward model, with weight 1, and here are {names}: put the others into functions"
        )
    ours: dict[str, Any] = {"data.ground_truth_key": None, "data.default_data_source": "trl"}
    if models:
        ours["reward_model.path"] = models[0][0]
    if models and not functions:
        ours["reward.weight"] = 0.0
    problems = [problem for problem in (_problem(part, functions) for part, _ in functions) if problem]
    if problems:
        return refuse(problems[0])
    places = [{"path": _file(part), "name": part["name"], "weight": weight} for part, weight in functions]
    if len(places) == 1:
        weight = places[0].pop("weight")
        ours |= {f"reward.{name}": setting for name, setting in places[0].items()}
        ours |= {} if weight == 1 else {"reward.weight": weight}
    elif places:
        ours["reward.functions"] = places
    note = "columns of the data reach the function by name, as in TRL"
    if any(part["from"] == "copy" for part, _ in functions):
        note += "; with OUT a copy of the functions is written, since the script cannot be loaded without TRL"
    return many(ours, note)


_CHOOSING = ("train_test_split", "select", "filter", "shard", "take", "skip")
"""Methods of a data set that leave some of its rows."""
_PROMPT = "rows need a column `prompt`: data.prompt_key names another"
_COLUMNS = {
    "SFT": "rows have messages, or prompt and completion",
    "DPO": "rows have chosen and rejected, and prompt where these are no whole conversations",
    "Reward": "rows have chosen and rejected, and prompt where these are no whole conversations",
    "KTO": "rows have prompt, completion and label",
}
"""Columns of the rows of a data set, by kind of training; text in them goes through the chat template."""


def _file(function: Mapping[str, Any]) -> str:
    if function["from"] in ("script", "copy"):
        return str(function["path"])
    return str(Path(function["folder"]).joinpath(*str(function["module"]).split(".")).with_suffix(".py"))


def _problem(function: Mapping[str, Any], functions: Sequence[tuple[Mapping[str, Any], float]]) -> str:
    """Reason for which strop cannot load the function, with the remedy; empty where it can."""
    name = function["name"]
    if function["from"] == "script" and function["why_not"]:
        functions_of_script = [
            (part["name"], weight) for part, weight in functions if part["from"] == "script"
        ]
        set_it = "set reward.path and reward.name"
        if len(functions) > 1:
            listed = ", ".join(
                f"{{path: FILE, name: {part}, weight: {weight}}}" for part, weight in functions_of_script
            )
            set_it = f"name them in reward.functions: [{listed}]"
        names = ", ".join(part for part, _ in functions_of_script)
        return (
            f"loading {function['path']} {function['why_not']}: move {names} into another file and {set_it}"
        )
    module = str(function.get("module", ""))
    if module.partition(".")[0] in ("trl", "open_r1"):
        return f"{name} belongs to {module}: copy it into a file of yours and set reward.path"
    return ""


def dataset(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """A data set by its load_dataset(...), or several in one."""
    if value is None:
        return skip("none there, none here")
    if not isinstance(value, Mapping):
        raise UnreadableError(f"{value!r} is no load_dataset(...) with literal arguments: set {ours}")
    outcome = _mixture(key, value, ours) if "parts" in value else _loaded(key, value, ours)
    trained = facts.get(f"{key.partition('.')[0]}.train_dataset")
    if not key.endswith(".eval_dataset") or not isinstance(trained, Mapping) or not _steps(trained, value):
        return outcome
    same = _entries(value) & _entries(trained)
    if not same:
        return outcome
    steps = ", ".join(dict.fromkeys(_steps(trained, value)))
    return refuse(
        f"{', '.join(sorted(same))} has the rows of training too, which {steps} tells apart there: write both parts "
        f"into files, and set {ours.replace('val_files', 'train_files')} and {ours}"
    )


def _parts(value: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    parts: Sequence[Mapping[str, Any]] = value.get("parts") or [value]
    return parts


def _steps(*values: Mapping[str, Any]) -> list[str]:
    """Steps that choose among the rows of data sets."""
    steps = [step for value in values for part in _parts(value) for step in part.get("steps") or []]
    return [step for step in steps if step in _CHOOSING]


def _entries(value: Mapping[str, Any]) -> set[str]:
    """Entries of data.train_files that a data set comes from."""
    loaded = [_loaded("", part, "files") for part in _parts(value)]
    return {entry for outcome in loaded for entry in outcome.ours.get("files", ())}


def _mixture(key: str, value: Mapping[str, Any], ours: str) -> Outcome:
    """Several data sets: one after the other, with a share of the rows of each, or of all that is drawn."""
    loaded = [_loaded(key, part, ours) for part in value["parts"]]
    refused = next((part for part in loaded if part.status == "refused"), None)
    if refused is not None:
        return refused
    entries = [entry for part in loaded for entry in part.ours[ours]]
    notes = dict.fromkeys(part.note for part in loaded if part.note)
    section, _, split = ours.rpartition(".")
    names = [entry_names(entries)[part.ours[ours][0]] for part in loaded]
    weights, shares = [part.get("weight") for part in value["parts"]], value.get("shares")
    settings: dict[str, Any] = {ours: entries}
    if split == "val_files" or not (shares or any(weight not in (None, 1) for weight in weights)):
        return many(settings, "; ".join(notes))
    if section == "prefer.data":
        return refuse(
            f"every row is visited equally often: write the rows that you want into a file, and set {ours}"
        )
    if any(len(part.ours[ours]) > 1 for part in loaded):
        raise UnreadableError(
            f"a weight is for one file here: set {section}.source_weights by the names of files"
        )
    if shares:
        settings[f"{section}.source_shares"] = dict(zip(names, shares, strict=True))
    else:
        settings[f"{section}.source_weights"] = {
            name: 1.0 if weight is None else number(weight)
            for name, weight in zip(names, weights, strict=True)
        }
        notes["the share of its rows that an epoch visits, others in the next"] = None
    return many(settings, "; ".join(notes))


def _loaded(key: str, value: Mapping[str, Any], ours: str) -> Outcome:
    path, files = value.get("path"), value.get("data_files")
    steps = [step for step in value.get("steps") or [] if step != "shuffle"]  # rows are shuffled in any case
    split = value.get("split")
    if isinstance(files, Mapping):
        files = files.get(split or "train")
    note = f"its rows go through {', '.join(steps)} there: write the result into a file" if steps else ""
    if steps and key.startswith("PPO"):
        note = (
            f"its rows go through {', '.join(steps)} there; here prompts are text or messages: data.prompt_key names "
            f"the column"
        )
    is_plain = isinstance(split, str) and split.replace("_", "").isalnum()
    entries = []
    if path in ("json", "parquet") and files:
        entries = [files] if isinstance(files, str) else list(files)
    elif path and Path(path).suffix in (".json", ".jsonl", ".parquet"):
        entries = [path]
    if entries and (is_plain or split is None):
        return many({ours: entries}, note)
    if isinstance(path, str) and path.count("/") == 1 and path[0] not in "./~" and is_plain and not files:
        name = f"hub:{path}{':' + value['name'] if value.get('name') else ''}@{split}"
        return many({ours: [name]}, note or _COLUMNS.get(key.partition("Trainer")[0], _PROMPT))
    location = ", ".join(entries) or str(path)
    location += f", split {split}" if split else ""
    return refuse(f"{location}: write it to a file (.parquet) and set {ours}{'; ' + note if note else ''}")


_OF_LOADING = (
    *("device_map", "use_cache", "low_cpu_mem_usage", "cache_dir", "token", "use_auth_token", "max_memory"),
    *(
        "load_in_4bit",
        "load_in_8bit",
        "quantization_config",
        "use_safetensors",
        "max_seq_length",
        "fast_inference",
    ),
    *("max_lora_rank", "gpu_memory_utilization", "full_finetuning"),
)
"""Arguments that place weights on a device, which is the engine's business here; the last ones are Unsloth's."""


def model_arguments(key: str, value: object, facts: Facts) -> Outcome:
    """Arguments that are passed on to from_pretrained; what is refused of them keeps no other one from being set."""
    if value is not None and not isinstance(value, Mapping):
        raise UnreadableError(f"{value!r} would have to be a dictionary")
    ours: dict[str, Any] = {}
    not_passed: list[str] = []
    refused: list[str] = []
    note = "placement is the engine's"
    for name, setting in (value or {}).items():
        if name == "attn_implementation":
            chosen = attention(setting)
            if not isinstance(chosen, Outcome):
                ours["model.attn_implementation"] = chosen
            elif chosen.status == "refused":
                refused.append(chosen.note)
            else:
                note = chosen.note
        elif name in ("torch_dtype", "dtype") and setting in ("bfloat16", "float16", "float32", "auto"):
            ours["model.dtype"] = setting
        elif name in ("trust_remote_code", "revision", "local_files_only"):
            ours[f"model.{name}"] = setting
        elif name in ("load_in_4bit", "load_in_8bit", "quantization_config") and setting not in (None, False):
            refused.append("weights are not quantized in training: leave it out")
        elif name not in _OF_LOADING:
            not_passed.append(name)
    if not_passed:
        refused.append(
            f"{', '.join(not_passed)} cannot be passed on: what belongs to config.json is set in model.override_config"
        )
    if refused:
        return replace(refuse("; ".join(dict.fromkeys(refused))), ours=ours)
    return many(ours) if ours else skip(note)


def reward_classifier(key: str, value: object, facts: Facts) -> Outcome:
    """The model that scores answers."""
    outcome = model_path(key, value, facts, ours="reward_model.path")
    note = "it reads the conversation through its own chat template: reward_model.chat_template names one"
    return many({**outcome.ours, "reward.weight": 0.0}, note) if outcome.ours else outcome


def template_file(key: str, value: object, facts: Facts) -> Outcome:
    """A file with a chat template, or a tokenizer whose template is taken."""
    if not value:
        return skip("the tokenizer's own")
    if str(value).endswith((".jinja", ".j2")):
        return many({"model.chat_template": value})
    return refuse(f"model.chat_template takes a file or a text: write the template of {value} into a file")
