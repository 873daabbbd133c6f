"""TRL: what follows from several arguments. What becomes of each argument stands in trl.toml.

TRL counts samples per device and optimizer steps; strop counts prompts per step, samples per optimizer step, and
steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from strop.compat.migration.found import Found
from strop.compat.migration.outcomes import (
    Facts,
    Outcome,
    UnreadableError,
    integer,
    many,
    number,
    refuse,
    skip,
)
from strop.compat.migration.rules import attention, model_path, tracker_names
from strop.compat.migration.tables import Migration, Table, apply_table, read_table
from strop.compat.migration.trl_ppo import PPO_FUNCTIONS, of_ppo, with_critic

KINDS = ("GRPO", "RLOO", "PPO", "SFT")


@cache
def trl_table(kind: str) -> Table:
    """The arguments of a trainer and its configuration, of one of KINDS."""
    return read_table("trl", FUNCTIONS, kind=kind)


def migrate_trl(found: Sequence[Found], kind: str, *, processes: int = 1) -> Migration:
    """What becomes of every argument of a TRL script.

    Args:
        found: its arguments.
        kind: one of KINDS.
        processes: with how many the script was started.
    """
    table = trl_table(kind)
    defaults = {**table.defaults, f"{kind}Config.delta": None, "processes": processes}
    write_out = list(table.written_out)
    given = {one.key: one.value for one in found if not one.unresolved}
    if kind != "SFT" and given.get(f"{kind}Config.use_vllm") is True:
        write_out.append(f"{kind}Config.vllm_importance_sampling_correction")
    start = Found(key="processes", value=processes, place="--processes")
    migration = apply_table([start, *found], table, defaults=defaults, write_out=write_out)
    return with_critic(migration) if kind == "PPO" else migration


def _of(facts: Facts, name: str) -> Any:
    """An argument of the configuration, whichever kind it is."""
    return next((value for kind in KINDS if (value := facts.get(f"{kind}Config.{name}")) is not None), None)


def processes(key: str, value: Any, facts: Facts) -> Outcome:
    """How many processes the script was started with."""
    if value == 1:
        return skip("one; say --processes N if the script was started with N")
    return many({"resources.ranks": value, "resources.runtime": "ray"})


class _Batch:
    """The batch arithmetic of TRL, from its arguments."""

    def __init__(self, facts: Facts) -> None:
        def whole(name: str, otherwise: int = 1) -> int:
            value = _of(facts, name)
            return (0 if value is None else integer(value)) or otherwise

        accumulated = whole("gradient_accumulation_steps")
        together = whole("per_device_train_batch_size") * int(facts.number("processes"))
        self.per_update = together * accumulated
        """Samples of an optimizer step."""
        default = together * whole("steps_per_generation", accumulated * whole("num_mini_batches"))
        self.per_step = whole("generation_batch_size", default)
        """Samples that are generated together."""
        self.num_generations = whole("num_generations")
        self.updates = -(-self.per_step // self.per_update) * whole("num_iterations")
        """Optimizer steps per generation."""


def batches(key: str, value: Any, facts: Facts) -> Outcome:
    """Samples per device as prompts per step and samples per optimizer step."""
    batch = _Batch(facts)
    if key.startswith("SFT"):
        ours = {"sft.examples_per_update": batch.per_update}
        return many(ours, "per device x processes x accumulation")
    prompts, left = divmod(batch.per_step, batch.num_generations)
    if key.startswith("PPO"):
        return many(of_ppo(batch.per_step, batch.per_update), "one answer to each prompt there")
    if left:
        raise UnreadableError(
            f"{batch.per_step} samples are generated together, which is no multiple of "
            f"{batch.num_generations} generations"
        )
    return many(
        {"data.prompts_per_step": prompts, "actor.samples_per_update": batch.per_update},
        f"{batch.per_step} samples / {batch.num_generations} generations; {batch.per_update} per step",
    )


def counted(key: str, value: Any, facts: Facts, *, ours: str) -> Outcome:
    """A number of optimizer steps as steps."""
    if value is None or value < 0:
        return skip("not set")
    if isinstance(value, float) and value < 1:
        return refuse("a share of all steps is known only with the data: set the number")
    steps = integer(value)
    if key.startswith("SFT") or steps == 0:
        return many({ours: steps})
    updates = _Batch(facts).updates
    return many(
        {ours: max(1, -(-steps // updates))}, f"{updates} optimizer steps per step" if updates > 1 else ""
    )


def save_steps(key: str, value: Any, facts: Facts) -> Outcome:
    """Steps between checkpoints."""
    if _of(facts, "save_strategy") not in (None, "steps"):
        return skip("read with save_strategy=steps alone")
    return counted(key, value, facts, ours="run.save_every")


def saved(key: str, value: Any, facts: Facts) -> Outcome:
    """When checkpoints are written."""
    if str(value) == "no":
        return many({"run.save_every": 0}, "one checkpoint at the end remains")
    is_steps = str(value) == "steps"
    return many({}, "save_steps says when") if is_steps else refuse("say it in steps: run.save_every")


def evaluated(key: str, value: Any, facts: Facts) -> Outcome:
    """When and how validation samples."""
    if str(value) == "no":
        return many({"eval.every": 0, "eval.before_train": False})
    if str(value) != "steps":
        return refuse("say it in steps: eval.every")
    given = _of(facts, "num_generations_eval")
    ours = {
        "eval.samples_per_prompt": _of(facts, "num_generations") if given is None else given,
        "eval.temperature": _of(facts, "temperature"),
    }
    return many(ours, "TRL validates as it trains; eval_steps says when")


def measured(key: str, value: Any, facts: Facts) -> Outcome:
    """When the loss of validation data is measured."""
    if str(value) == "no":
        return many({"eval.every": 0, "eval.before_train": False})
    if str(value) != "steps":
        return refuse("say it in steps: eval.every")
    return many({}, "eval_steps says when")


def betas(key: str, value: Any, facts: Facts, *, ours: str) -> Outcome:
    """Both decay rates, from two arguments."""
    first, second = _of(facts, "adam_beta1"), _of(facts, "adam_beta2")
    return many({ours: [0.9 if first is None else first, 0.999 if second is None else second]})


def warmup(key: str, value: Any, facts: Facts, *, ours: str) -> Outcome:
    """Steps of warm-up, or their share of all steps."""
    if isinstance(value, float) and 0 < value < 1:
        return warmup_share(key, value, facts, ours=ours)
    return many({ours: integer(value)})


def warmup_share(key: str, value: Any, facts: Facts, *, ours: str) -> Outcome:
    """A share of all steps."""
    total = _of(facts, "max_steps")
    if not value:
        return skip("no warm-up there, none here")
    if not isinstance(total, int) or total < 1:
        return many({f"{ours.removesuffix('steps')}share": value})
    return many({ours: math.ceil(round(value * total, 6))})


def epochs(value: Any, facts: Facts) -> Any:
    """Whole visits of the rows."""
    if number(value) != int(value):
        return refuse("strop visits every row equally often: use whole epochs, or max_steps")
    return int(value)


def precision(value: Any, facts: Facts) -> Any:
    """bf16."""
    return "bfloat16" if value is True else skip("float32 on a CPU, see model.dtype")


def trackers(value: Any, facts: Facts) -> Outcome:
    """Where metrics go."""
    known = {"tensorboard": "tensorboard", "all": "tensorboard", "none": "console"}
    found, missing = tracker_names(value, known)
    ours = ["console", "jsonl", *(["tensorboard"] if "tensorboard" in found else [])]
    note = f"no tracker for {', '.join(missing)}: metrics are in metrics.jsonl" if missing else ""
    return many({"trainer.trackers": ours}, note)


def model_arguments(key: str, value: Any, facts: Facts) -> Outcome:
    """What is passed on to from_pretrained."""
    if value is not None and not isinstance(value, Mapping):
        raise UnreadableError(f"{value!r} would have to be a dictionary")
    ours: dict[str, Any] = {}
    left = []
    note = "placement is the engine's"
    for name, given in (value or {}).items():
        if name == "attn_implementation":
            chosen = attention(given)
            if not isinstance(chosen, Outcome):
                ours["model.attn_implementation"] = chosen
            elif chosen.status == "refused":
                return chosen
            else:
                note = chosen.note
        elif name in ("torch_dtype", "dtype") and given in ("bfloat16", "float16", "float32", "auto"):
            ours["model.dtype"] = given
        elif name in ("trust_remote_code", "revision", "local_files_only"):
            ours[f"model.{name}"] = given
        elif name not in ("device_map", "use_cache"):
            left.append(name)
    if left:
        return refuse(
            f"{', '.join(left)} cannot be passed on: what belongs to config.json is set in model.override_config"
        )
    return many(ours) if ours else skip(note)


def template_file(key: str, value: Any, facts: Facts) -> Outcome:
    """A file with a chat template, or a tokenizer whose template is taken."""
    if not value:
        return skip("the tokenizer's own")
    if str(value).endswith((".jinja", ".j2")):
        return many({"model.chat_template": value})
    return refuse(f"model.chat_template takes a file or a text: write the template of {value} into a file")


def prompt_limit(value: Any, facts: Facts) -> Outcome:
    """The longest prompt."""
    if value is None:
        return many({}, "longer prompts than data.max_prompt_tokens are dropped here")
    ours = {"data.max_prompt_tokens": integer(value)}
    return many(ours, "longer prompts are dropped and counted; TRL cuts them on the left")


# The loss.


def grpo_kl(key: str, value: Any, facts: Facts) -> Outcome:
    """GRPO's KL term, in the loss."""
    beta = number(value)
    if beta == 0:
        return skip("no KL term, as by default")
    ours = {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": beta}
    return many({**ours, "algorithm.kl_loss_type": "low_var_kl"})


def rloo_kl(key: str, value: Any, facts: Facts) -> Outcome:
    """RLOO, with its KL term in the reward."""
    ours: dict[str, Any] = {
        "algorithm.adv_estimator": "rloo",
        "algorithm.loss_agg_mode": "seq-mean-token-sum",
    }
    beta = number(value)
    if beta == 0:
        return many(ours)
    ours |= {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": beta}
    return many(ours, "TRL takes it off the reward of a response")


def loss(key: str, value: Any, facts: Facts) -> Outcome:
    """The loss and its aggregation."""
    mode, kind = "algorithm.loss_agg_mode", "algorithm.policy_loss"
    known: dict[str, dict[str, Any]] = {
        "grpo": {mode: "seq-mean-token-mean"},
        "bnpo": {mode: "token-mean"},
        "dapo": {mode: "token-mean"},
        "dr_grpo": {
            mode: "seq-mean-token-sum-norm",
            "algorithm.loss_scale_factor": _of(facts, "max_completion_length"),
        },
        "cispo": {kind: "cispo", mode: "token-mean", "algorithm.clip_ratio_low": 1.0},
        "sapo": {kind: "sapo"},
    }
    if value not in known:
        return refuse(f"strop has {', '.join(known)}")
    return many(known[value], "no lower bound, as in TRL" if value == "cispo" else "")


def clip_high(value: Any, facts: Facts) -> Any:
    """The upper side of the clip range."""
    if _of(facts, "loss_type") != "cispo":
        return number(value)
    ours = {"algorithm.clip_ratio_high": number(value) - 1}
    return many(ours, "TRL bounds the weight itself, strop its distance from 1")


def level(value: Any, facts: Facts) -> Any:
    """Ratios of tokens or of samples."""
    if value == "token":
        return skip("as by default")
    return "gspo" if value == "sequence" else refuse("use token or sequence")


def scale(key: str, value: Any, facts: Facts) -> Outcome:
    """What rewards are divided by."""
    if value == "mean":
        return many({"algorithm.adv_estimator": "maxrl"}, "divided by the group's mean, which is MaxRL")
    if value in (True, "group", False, "none"):
        return many({"algorithm.norm_adv_by_std": value in (True, "group")})
    return refuse("rewards are scaled per group or not at all: use group, mean or none")


def of_sapo(value: Any, facts: Facts) -> Any:
    """A number of SAPO alone."""
    return number(value) if _of(facts, "loss_type") == "sapo" else skip("read by loss_type='sapo' alone")


def cap(key: str, value: Any, facts: Facts) -> Outcome:
    """The dual clip."""
    if value is None:
        return many({"algorithm.clip_ratio_c": float("inf")}, "TRL has no dual clip unless delta is set")
    return many({"algorithm.clip_ratio_c": number(value)})


def correction(key: str, value: Any, facts: Facts) -> Outcome:
    """The correction of what vLLM samples."""
    if value is not True or _of(facts, "use_vllm") is not True:
        return skip("read with use_vllm=True alone")
    weights, _, action = str(_of(facts, "vllm_importance_sampling_mode")).partition("_")
    ours: dict[str, Any] = {"algorithm.correction.weights": weights}
    if action == "mask":
        ours |= {"algorithm.correction.mode": "mask", "algorithm.correction.lower": 1e-9}
    ours["algorithm.correction.upper"] = number(_of(facts, "vllm_importance_sampling_cap"))
    return many(ours)


# The trainer's own arguments.


def rewards(key: str, value: Any, facts: Facts) -> Outcome:
    """Reward functions and reward models, with their weights."""
    parts = value if isinstance(value, list) else [value]
    if text := next((part.get("text") for part in parts if part.get("from") == "expression"), None):
        raise UnreadableError(
            f"{text} is neither a function of this script nor an imported one: set reward.path"
        )
    weights = _of(facts, "reward_weights") or [1.0] * len(parts)
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
        ours |= {f"reward.{name}": place for name, place in places[0].items()}
        ours |= {} if weight == 1 else {"reward.weight": weight}
    elif places:
        ours["reward.functions"] = places
    return many(ours, "columns of the data reach the function by name, as in TRL")


def _file(function: Mapping[str, Any]) -> str:
    if function["from"] == "script":
        return str(function["path"])
    return str(Path(function["folder"]).joinpath(*str(function["module"]).split(".")).with_suffix(".py"))


def _problem(function: Mapping[str, Any], functions: Sequence[tuple[Mapping[str, Any], float]]) -> str:
    """Why strop cannot load the function, and what to do; empty where it can."""
    name = function["name"]
    if function["from"] == "script" and function["why_not"]:
        own = [(part["name"], weight) for part, weight in functions if part["from"] == "script"]
        set_it = "set reward.path and reward.name"
        if len(functions) > 1:
            listed = ", ".join(f"{{path: FILE, name: {part}, weight: {weight}}}" for part, weight in own)
            set_it = f"name them in reward.functions: [{listed}]"
        names = ", ".join(part for part, _ in own)
        return (
            f"loading {function['path']} {function['why_not']}: move {names} into another file and {set_it}"
        )
    module = str(function.get("module", ""))
    if module.partition(".")[0] in ("trl", "open_r1"):
        return f"{name} belongs to {module}: copy it into a file of yours and set reward.path"
    return ""


def dataset(key: str, value: Any, facts: Facts, *, ours: str) -> Outcome:
    """A data set by its load_dataset(...)."""
    if value is None:
        return skip("none there, none here")
    if not isinstance(value, Mapping):
        raise UnreadableError(f"{value!r} is no load_dataset(...) with literal arguments: set {ours}")
    path, files, steps = value.get("path"), value.get("data_files"), value.get("steps") or []
    split = value.get("split")
    if isinstance(files, Mapping):
        files = files.get(split or "train")
    done = f"its rows go through {', '.join(steps)} there: write the result into a file" if steps else ""
    if path in ("json", "parquet") and files:
        return many({ours: [files] if isinstance(files, str) else list(files)}, done)
    if path and Path(path).suffix in (".json", ".jsonl", ".parquet"):
        return many({ours: [path]}, done)
    is_plain = isinstance(split, str) and split.replace("_", "").isalnum()
    if isinstance(path, str) and path.count("/") == 1 and path[0] not in "./~" and is_plain and not files:
        name = f"hub:{path}{':' + value['name'] if value.get('name') else ''}@{split}"
        return many({ours: [name]}, done or "rows need a column `prompt`: data.prompt_key names another")
    place = f"{path}, split {split}" if split else str(path)
    return refuse(f"{place}: write it to a file (.parquet) and set {ours}{'; ' + done if done else ''}")


FUNCTIONS = {
    function.__name__: function
    for function in (
        *(
            processes,
            batches,
            counted,
            save_steps,
            saved,
            evaluated,
            measured,
            betas,
            warmup,
            warmup_share,
            epochs,
        ),
        *(
            precision,
            trackers,
            model_arguments,
            template_file,
            prompt_limit,
            grpo_kl,
            rloo_kl,
            loss,
            clip_high,
            level,
        ),
        *(scale, of_sapo, cap, correction, rewards, dataset, model_path),
        *PPO_FUNCTIONS,
    )
}
"""What the rows of trl.toml name."""
