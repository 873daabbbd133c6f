"""Arguments of TRL's trainers, and of the adapter that they may be given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.config.migration.outcomes import Facts, Outcome, Rule, UnreadableError, many, refuse, skip
from strop.config.migration.rules import NotNeeded, Refused, To, Unless
from strop.config.migration.tables import Entry, same
from strop.config.migration.trl.training_arguments import CALLBACKS
from strop.config.migration.values import integer, model_path, number, one_or_more

_ELSEWHERE = "its own rows say what it holds"

LORA = (
    Entry("r", To("model.lora.rank", integer)),
    Entry("lora_alpha", To("model.lora.alpha", number)),
    Entry("target_modules", To("model.lora.target_modules", one_or_more)),
    Entry("lora_dropout", Unless((0, 0.0), "adapters have no dropout", "none")),
    Entry("bias", Unless(("none",), "biases stay as they are", "none")),
    Entry("modules_to_save", Unless(([],), "adapters alone are trained", "none")),
    Entry("use_rslora", Unless((False,), "the scale is alpha / rank", "off")),
    Entry("init_lora_weights", Unless((True,), "adapters start at zero", "adapters start at zero")),
    *same(
        Unless((False, [], {}), "adapters are plain LoRA of whole linear layers: model.lora", "not set"),
        "use_dora exclude_modules fan_in_fan_out layers_to_transform layers_pattern rank_pattern alpha_pattern "
        "trainable_token_indices loftq_config eva_config corda_config lora_ga_config velora_config "
        "alora_invocation_tokens use_qalora qalora_group_size monteclora_config layer_replication lora_bias "
        "target_parameters use_bdlora arrow_config kasa_config ensure_weight_tying megatron_config megatron_core",
    ),
    *same(
        NotNeeded("the role and the model's folder say it"),
        "task_type peft_type auto_mapping base_model_name_or_path revision inference_mode runtime_config peft_version",
    ),
)
"""What becomes of the arguments of LoraConfig."""


def trainer_entries(kind: str) -> tuple[Entry, ...]:
    """What becomes of the arguments of a trainer itself."""
    section = "sft.data" if kind == "SFT" else "data"
    return (
        Entry("model", To("model.path", model_path("model.path"))),
        *same(NotNeeded(_ELSEWHERE), "args peft_config"),
        Entry("train_dataset", _dataset(f"{section}.train_files")),
        Entry("eval_dataset", _dataset(f"{section}.val_files")),
        *same(NotNeeded("the tokenizer is the one in model.path"), "processing_class tokenizer"),
        *CALLBACKS,
        Entry("data_collator", Refused("batches are made by strop: put what it does into the data")),
        *same(
            Refused("the optimizer is set under optim: name and numbers"),
            "optimizers optimizer_cls_and_kwargs",
        ),
        Entry("formatting_func", Refused("write its result into a column of the data")),
        *same(
            Refused("metrics come from the reward function: return them there"),
            "compute_metrics preprocess_logits_for_metrics",
        ),
        Entry("quantization_config", Refused("weights are not quantized in training: leave it out")),
        *(() if kind == "SFT" else _RL),
    )


def _rewards(key: str, value: Any, facts: Facts) -> Outcome:
    rewards = value if isinstance(value, list) else [value]
    functions = [one for one in rewards if one.get("from") in ("module", "script")]
    models = [one for one in rewards if one.get("from") == "model"]
    if len(functions) + len(models) < len(rewards):
        text = next(one.get("text") for one in rewards if one.get("from") == "expression")
        raise UnreadableError(
            f"{text} is neither a function of this script nor an imported one: set reward.path"
        )
    given = facts.get("GRPOConfig.reward_weights") or facts.get("RLOOConfig.reward_weights")
    weights = given or [1.0] * len(rewards)
    if len(weights) != len(rewards):
        raise UnreadableError(
            f"{len(rewards)} rewards, and {len(weights)} reward_weights: set reward.functions"
        )
    weight_of = {id(one): weight for one, weight in zip(rewards, weights, strict=True)}
    if len(models) > 1 or any(weight_of[id(model)] != 1 for model in models):
        names = ", ".join(str(model["path"]) for model in models)
        return refuse(
            f"strop has one reward model, with weight 1, and here are {names}: put the others into functions"
        )
    ours: dict[str, Any] = {"data.ground_truth_key": None, "data.default_data_source": "trl"}
    for model in models:
        ours |= {"reward_model.path": model["path"]}
        if not functions:
            ours["reward.weight"] = 0.0
    places: list[dict[str, Any]] = []
    for function in functions:
        places.append({})
        problem = _place_of(function, places[-1])
        if problem:
            return refuse(problem)
    if len(places) == 1:
        ours |= {f"reward.{name}": value for name, value in places[0].items()}
        if (weight := weight_of[id(functions[0])]) != 1:
            ours["reward.weight"] = weight
    elif places:
        ours["reward.functions"] = [
            {**place, "weight": weight_of[id(function)]}
            for place, function in zip(places, functions, strict=True)
        ]
    return many(ours, "columns of the data reach the function by name, as in TRL")


def _place_of(function: Mapping[str, Any], place: dict[str, Any]) -> str:
    """Fill in path and name of the function; a sentence where strop cannot load it."""
    if function["from"] == "script":
        if not function["is_safe"]:
            return (
                f"loading {function['path']} for {function['name']} would start the training in it: move the function "
                f"into a file of its own and set reward.path"
            )
        place |= {"path": function["path"], "name": function["name"]}
        return ""
    module = str(function["module"])
    if module.partition(".")[0] in ("trl", "open_r1"):
        return f"{function['name']} belongs to {module}: copy it into a file of yours and set reward.path"
    file = Path(function["folder"]).joinpath(*module.split(".")).with_suffix(".py")
    place |= {"path": str(file), "name": function["name"]}
    return ""


_RL = (
    Entry("reward_funcs", _rewards),
    Entry("reward_processing_classes", NotNeeded("the tokenizer is the one in reward_model.path")),
    Entry("rollout_func", Refused("generation is strop's own: leave the argument out")),
    Entry("tools", Refused("mark the functions @function_tool in a file of their own: agent.function_tools")),
    Entry("environment_factory", Refused("an environment is an agent of your own here: agent.files")),
)


def _dataset(ours: str) -> Rule:
    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if value is None:
            return skip("none there, none here")
        if not isinstance(value, Mapping):
            raise UnreadableError(f"{value!r} is no load_dataset(...) with literal arguments: set {ours}")
        path, files, steps = value.get("path"), value.get("data_files"), value.get("steps") or []
        if isinstance(files, Mapping):
            files = files.get(value.get("split") or "train")
        done = f"its rows go through {', '.join(steps)} there: write the result into a file" if steps else ""
        if path in ("json", "parquet") and files:
            return many({ours: [files] if isinstance(files, str) else list(files)}, done)
        if path and Path(path).suffix in (".json", ".jsonl", ".parquet"):
            return many({ours: [path]}, done)
        name = f"{path}, split {value.get('split')}" if value.get("split") else str(path)
        return refuse(f"{name}: write it to a file (.parquet) and set {ours}{'; ' + done if done else ''}")

    return rule
