"""OpenRLHF: rules that depend on several of its flags. The row of each flag stands in openrlhf*.toml."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from strop.compat.migrate import engines, variables
from strop.compat.migrate.flags import PROGRAMS, Flags
from strop.compat.migrate.openrlhf_names import CRITICS, has_dotted_flags, names_of, with_names_of_rows
from strop.compat.migrate.result import (
    Facts,
    Outcome,
    UnreadableError,
    integer,
    lack,
    many,
    number,
    refuse,
    skip,
)
from strop.compat.migrate.rules import (
    functions_of,
    installed_trackers,
    longest_conversation,
    shown_as,
    tracker_names,
    without_trackers,
)
from strop.compat.migrate.tables import Migration, Table, apply_table, read_table
from strop.data.mixture import entry_names

SOURCE = "openrlhf"
"""data.default_data_source of its rows, which have none."""
_KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


_FILES = {"train": "openrlhf", "sft": "openrlhf_sft", "prefer": "openrlhf_prefer"}


@cache
def openrlhf_table(program: str = "train_ppo_ray") -> Table:
    """The flags of one of its programs."""
    command = PROGRAMS[program]
    kind = program if command == "prefer" else ""
    return read_table(_FILES[command], functions_of(globals(), vars(engines), vars(variables)), kind=kind)


def migrate_openrlhf(flags: Flags, *, engine: object = None) -> Migration:
    """Migration of every flag of a script.

    Args:
        flags: of the script.
        engine: rollout.engine, where it is given beside them.
    """
    table, settings = openrlhf_table(flags.program), with_names_of_rows(flags.found, flags.program)
    defaults, write_out = dict(table.defaults), list(table.written_out)
    critics = ["critic_learning_rate"]
    if has_dotted_flags(flags.found):
        names = names_of(flags.program)
        defaults |= names.defaults
        write_out = [*(key for key in write_out if key not in names.never), *names.written_out]
        critics += CRITICS
    values = {setting.key: setting.value for setting in settings if not setting.unresolved}
    theirs = "vllm" if values.get("vllm_num_engines") else None
    defaults[engines.ENGINE] = engines.engine_of(theirs, engine)
    if uses_critic(Facts(values, defaults)) and "advantage_estimator" in table.rules:
        write_out += critics
    if values.get("lora_rank") not in (None, 0):
        write_out.append("lora_alpha")
    if values.get("eval_dataset") and "eval_temperature" in table.rules:
        write_out += ["eval_temperature", "eval_n_samples_per_prompt"]
    if "use_dynamic_batch" not in values and "micro_train_batch_size" in table.defaults:
        write_out.append("micro_train_batch_size")
    return apply_table(settings, table, defaults=defaults, write_out=write_out)


# Conditions.


def uses_critic(facts: Facts) -> bool:
    """A value model is loaded."""
    return bool(facts.get("advantage_estimator") == "gae")


# Rewards and data.


def reward_models(key: str, value: object, facts: Facts) -> Outcome:
    """A reward model; with a function beside it, the function alone counts."""
    if not value:
        return skip("not set")
    if facts.get("remote_rm_url") or facts.get("agent_func_path"):
        return skip("the reward is that of --remote_rm_url or of the agent")
    if "," in str(value):
        return refuse("strop has one reward model: put the others into a reward function")
    ours = {"reward_model.path": value, "reward.weight": 0.0}
    return many(ours, "the reward is the model's alone; it is a classifier with one label")


def remote_reward(key: str, value: object, facts: Facts) -> Outcome:
    """A Python file with reward_func(queries, prompts, labels), or the address of a server."""
    text = str(value or "")
    if not text:
        return skip("not set")
    if facts.get("agent_func_path"):
        return skip("the reward is that of the agent")
    if not text.endswith(".py"):
        return refuse(
            "a server that speaks OpenRLHF's protocol is not asked: write a function that asks it into a file, and set "
            "reward.path; a server of strop's own form is reward.server"
        )
    return many({"reward.path": text, "reward.name": "reward_func"}, "the file works as it is")


def dataset(key: str, value: object, facts: Facts, *, ours: str, split: str) -> Outcome:
    """A data set by its path or its name on the hub, or several between commas."""
    if not value:
        return skip("none there, none here")
    names = [_source(name.strip(), str(facts.get(split) or "train")) for name in str(value).split(",")]
    extra: dict[str, Any] = {"data.default_data_source": SOURCE} if ours.startswith("data.") else {}
    if ours == "data.train_files" and not facts.get("label_key"):
        extra["data.ground_truth_key"] = None
    return many({ours: names, **extra})


def shares(key: str, value: object, facts: Facts, *, of: str, split: str) -> Outcome:
    """Shares of several data sets in the drawn rows."""
    names = [name.strip() for name in str(facts.get(of) or "").split(",")]
    numbers = [_share(share) for share in str(value).split(",")]
    if len(names) != len(numbers):
        raise UnreadableError(f"{len(names)} data sets, and {len(numbers)} shares")
    if len(names) == 1:
        return skip("one data set")
    entries = [_source(name, str(facts.get(split) or "train")) for name in names]
    called = entry_names(entries)
    section = "data" if of == "prompt_data" else "sft.data"
    return many(
        {
            f"{section}.source_shares": {
                called[entry]: share for entry, share in zip(entries, numbers, strict=True)
            }
        }
    )


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UnreadableError(f"{text!r} would have to be a number") from error


def _source(name: str, split: str) -> str:
    kind, at, folder = name.partition("@")
    if at and kind in ("json", "jsonl", "parquet", "csv"):  # files of that kind, in a folder
        return folder
    is_file = Path(name).suffix in (".json", ".jsonl", ".parquet")
    if is_file or name.startswith(("/", ".", "~")) or name.count("/") != 1 or Path(name).exists():
        return (
            name if is_file else f"{name}@{split}" if (Path(name) / "dataset_dict.json").is_file() else name
        )
    return f"hub:{name}@{split}"


def conversation(key: str, value: object, facts: Facts) -> Outcome:
    """The column with messages, or two columns."""
    output = facts.get("output_key")
    if output:
        return many({"sft.data.prompt_key": str(value), "sft.data.completion_key": str(output)})
    turns = "all" if facts.get("multiturn") is True else "last"
    note = "messages, since there is no --output_key; without --multiturn the last turn alone is trained"
    return many({"sft.data.messages_key": str(value), "sft.data.trained_turns": turns}, note)


def rated_answer(key: str, value: object, facts: Facts) -> Outcome:
    """The columns with the prompt and with the answer."""
    output = facts.get("output_key")
    if output:
        return many({"prefer.data.prompt_key": str(value), "prefer.data.completion_key": str(output)})
    return refuse("write the answer into a column of its own: prefer.data.completion_key")


def starting_model(key: str, value: object, facts: Facts) -> Outcome:
    """The model that the policy stays near."""
    if value in (None, "", facts.get("pretrain")):
        return skip("the policy as it is in the beginning, in both")
    return refuse("the policy stays near the model that it begins with: --pretrain")


# Batches.


def samples_per_update(key: str, value: object, facts: Facts) -> Outcome:
    """Samples of an optimizer step, of the policy and of the critic."""
    count = integer(value)
    ours = {"actor.samples_per_update": count}
    if uses_critic(facts):
        ours["critic.samples_per_update"] = count
    return many(ours, "samples in both")


def _longest(facts: Facts) -> int:
    if facts.get("today") and facts.get("max_len"):
        return facts.whole("max_len")
    return facts.whole("prompt_max_len") + facts.whole("generate_max_len")


def micro_batch(key: str, value: object, facts: Facts) -> Outcome:
    """A micro-batch of samples as the tokens it may have."""
    if facts.get("use_dynamic_batch") is True:
        return skip("--use_dynamic_batch bounds tokens instead")
    tokens = integer(value) * _longest(facts)
    roles = ["actor"] + ["critic"] * uses_critic(facts) + ["reference"] * bool(facts.get("init_kl_coef"))
    note = f"{value} samples of at most {_longest(facts)} tokens; strop bounds tokens, not samples"
    return many({f"{role}.engine.max_tokens_per_device": tokens for role in roles}, note)


def conversations(key: str, value: object, facts: Facts, *, ours: str, of_a_row: int) -> Outcome:
    """Rows of a pass as tokens."""
    tokens = integer(value) * of_a_row * facts.whole("max_len")
    return many({ours: tokens}, "strop bounds tokens, not conversations")


def cut_conversations(key: str, value: object, facts: Facts) -> Outcome:
    """The longest conversation of a fine-tuning; longer ones lose their end."""
    longest = longest_conversation(key, value, facts, section="sft", bounded_by="micro_train_batch_size")
    return many({**longest.ours, "sft.data.truncation": "right"})


def limits(key: str, value: object, facts: Facts) -> Outcome:
    """The limit of a prompt and its answer together, since flags have dots."""
    if not facts.get("today"):
        return refuse(
            "prompt and answer have limits of their own: data.max_prompt_tokens, data.max_response_tokens"
        )
    answer = facts.get("max_new_tokens")
    if answer is None:
        return refuse(
            f"an answer has what its prompt leaves of {value} tokens there: set data.max_prompt_tokens and "
            f"data.max_response_tokens"
        )
    prompt = integer(value) - integer(answer)
    if prompt < 1:
        raise UnreadableError(f"answers of {answer} tokens leave no prompt of {value}")
    return many({"data.max_prompt_tokens": prompt}, f"of {value}, answers have {answer}")


def band_of_weights(key: str, value: object, facts: Facts) -> Outcome:
    """The correction of the engine's samples, since flags have dots."""
    if value == "off":
        return skip("off there too")
    kinds = [facts.get(f"algo.advantage.is_correction_{name}") for name in ("mode", "gating")]
    if (value, *kinds) != ("token", "mask", "ratio"):
        return refuse("its band is of single tokens' ratios: algorithm.correction has others")
    low, high = _number_pair(facts.get("algo.advantage.is_correction_threshold"))
    ours = {"weights": "token", "mode": "mask", "lower": low, "upper": high}
    return many({f"algorithm.correction.{name}": value for name, value in ours.items()})


def ranks(key: str, value: object, facts: Facts) -> Outcome:
    """Devices of the actor, which the other roles share."""
    count = integer(value) * facts.whole("actor_num_nodes")
    if count == 1:
        return many({"resources.ranks": 1})
    note = f"{facts.get('actor_num_nodes')} nodes x {value} devices"
    return many({"resources.ranks": count, "resources.runtime": "ray"}, note)


# The algorithm and the optimizers.


def both(key: str, value: object, facts: Facts, *, ours: str, whole: bool = False) -> Outcome:
    """A number of the policy, and of the critic where there is one."""
    if isinstance(value, list):
        converted: Any = [number(entry) for entry in value]
    else:
        converted = integer(value) if whole else number(value)
    return many({f"{role}.{ours}": converted for role in _optimized_roles(facts)})


def _optimized_roles(facts: Facts) -> list[str]:
    """Roles whose optimizer a flag sets: flags with dots name it, others mean all."""
    return ["actor", "critic"] if uses_critic(facts) and not facts.get("today") else ["actor"]


def schedule(key: str, value: object, facts: Facts, *, role: str) -> Outcome:
    """Schedule of the learning rate."""
    lowest = facts.get("critic.min_lr_ratio" if role == "critic" else "min_lr_ratio")
    settings_of: dict[str, dict[str, Any]] = {
        "constant": {"schedule": "constant"},
        "constant_with_warmup": {"schedule": "constant"},
        "linear": {"schedule": "linear"},
        "cosine": {"schedule": "cosine"},
        "cosine_with_min_lr": {
            "schedule": "cosine",
            "min_lr_ratio": 0.1 if lowest is None else number(lowest),
        },
        "warmup_stable_decay": {"schedule": "wsd"},
    }
    if str(value) not in settings_of:
        return refuse("use constant, linear, cosine, cosine_with_min_lr or warmup_stable_decay")
    roles = _optimized_roles(facts) if role == "actor" else [role]
    is_tenth = value == "cosine_with_min_lr" and lowest in (None, 0.1)
    note = "min_lr is a tenth of the peak there" if is_tenth else ""
    chosen = settings_of[str(value)]
    return many({f"{at}.optim.{name}": to for at in roles for name, to in chosen.items()}, note)


def plain_advantages(key: str, value: object, facts: Facts) -> Outcome:
    """Advantages that are not divided by their deviation."""
    if value is not True:
        return skip("off there too")
    if facts.get("advantage_estimator") == "group_norm":
        return many({"algorithm.norm_adv_by_std": False})
    return refuse(
        "it is chosen for group_norm alone: algorithm.norm_adv_by_std with algorithm.adv_estimator=grpo"
    )


def clip_range(key: str, value: object, facts: Facts) -> Outcome:
    """Two clip ranges in place of eps_clip."""
    low, high = _number_pair(value)
    return many({"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": high})


def kl(key: str, value: object, facts: Facts) -> Outcome:
    """The KL term: a loss of its own, or a penalty in the reward."""
    coefficient = number(value)
    if coefficient == 0:
        return skip("no reference model there, none here")
    kind = _KL.get(str(facts.get("kl_estimator")))
    if kind is None:
        return refuse("kl_estimator is k1, k2 or k3")
    if facts.get("use_kl_loss") is True:
        return many(
            {
                "algorithm.use_kl_loss": True,
                "algorithm.kl_loss_coef": coefficient,
                "algorithm.kl_loss_type": kind,
            }
        )
    return many(
        {
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": coefficient,
            "algorithm.kl_penalty": kind,
        }
    )


def adaptive_kl(key: str, value: object, facts: Facts) -> Outcome:
    """A coefficient that follows the KL that is seen."""
    if value is None:
        return skip("a fixed coefficient there too")
    ours = {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": number(value)}
    return many({**ours, "algorithm.kl_ctrl.horizon": facts.whole("kl_horizon")})


def band(key: str, value: object, facts: Facts) -> Outcome:
    """Band of the mean rewards of the groups that are trained."""
    low, high = _number_pair(value)
    if facts.get("dynamic_filtering") is not True:
        return skip("read with --dynamic_filtering alone")
    if (low, high) == (0, 1):
        return skip("groups of equal rewards are left out, which those of mean 0 and of mean 1 are")
    return many({"algorithm.filter_groups.lowest_mean": low, "algorithm.filter_groups.highest_mean": high})


def correction(key: str, value: object, facts: Facts) -> Outcome:
    """The correction of vLLM's samples."""
    if value is not True:
        return skip("off there too")
    kind, bound = str(facts.get("vllm_is_correction_type")), facts.get("vllm_is_truncated_threshold")
    low, high = _number_pair(bound) if isinstance(bound, list) else (None, number(bound))
    ours: dict[str, Any] = {"algorithm.correction.weights": "token", "algorithm.correction.upper": high}
    if kind == "tis":
        return many(ours)
    if kind == "icepop":
        lower = {} if low is None else {"algorithm.correction.lower": low}
        return many({**ours, "algorithm.correction.mode": "mask", **lower})
    return lack("of its kinds there are tis and icepop: algorithm.correction has others")


def ahead(key: str, value: object, facts: Facts) -> Outcome:
    """Generation ahead of training by as many batches as its queue holds."""
    if value is not True:
        return skip("off there too")
    ours: dict[str, Any] = {"rollout.max_staleness": float(facts.get("async_queue_size") or 1)}
    if facts.get("enable_vllm_is_correction") is not True:
        ours["algorithm.correction.weights"] = "token"  # there, older samples are taken for new ones
    return many(ours, "older samples are weighed; for processes apart: resources.apart={rollout: N}")


def boards(value: object, facts: Facts) -> Any:
    """Trackers of the metrics."""
    if not value:
        return skip("not set")
    names = ["wandb"] if facts.get("use_wandb") else []
    known_trackers, missing = tracker_names(names, installed_trackers())
    ours = ["console", "jsonl", *known_trackers]
    if missing or facts.get("use_tensorboard"):
        ours.append("tensorboard")
    note = f"{without_trackers(missing)}; metrics.jsonl and TensorBoard instead" if missing else ""
    return many({"trainer.trackers": ours}, note)


def shown(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """Name of the run for trackers."""
    return shown_as(value, ["wandb"] if facts.get("use_wandb") else [], ours=ours)


def _number_pair(value: object) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise UnreadableError(f"{value!r} would have to be two numbers")
    return number(value[0]), number(value[1])
