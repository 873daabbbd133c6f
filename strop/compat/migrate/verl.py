"""verl: rules that depend on several of its keys. The row of each key stands in verl.toml and verl_sft.toml."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from strop.compat.migrate import (
    engines,
    variables,
    verl_agent,
    verl_algorithm,
    verl_async,
    verl_batches,
    verl_correction,
    verl_early,
    verl_megatron,
    verl_prime,
    verl_profiler,
    verl_scoring,
    verl_validation,
)
from strop.compat.migrate.result import Facts, Outcome, UnreadableError, integer, many, refuse, skip
from strop.compat.migrate.rules import (
    functions_of,
    installed_trackers,
    shown_as,
    tracker_names,
    without_trackers,
)
from strop.compat.migrate.source import GIVEN, Found
from strop.compat.migrate.tables import Migration, Table, apply_table, read_table
from strop.compat.migrate.verl_batches import is_dynamic, longest
from strop.engines.config import EngineConfig

A, R, M, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))
_PARTS = (
    *(engines, verl_agent, verl_algorithm, verl_async, verl_batches),
    *(
        variables,
        verl_correction,
        verl_early,
        verl_megatron,
        verl_prime,
        verl_profiler,
        verl_scoring,
        verl_validation,
    ),
)

_KNOWN_CONFIGS = (
    *("ppo_trainer", "sft_trainer", "sft_trainer_engine", "dapo_trainer"),
    *("fully_async_ppo_trainer", "one_step_off_ppo_trainer"),
)
_OTHER_ENGINES = "strop trains with FSDP2 or megatron-core, and not with VeOmni or TorchTitan"


@cache
def verl_table() -> Table:
    """verl's keys of reinforcement learning."""
    return read_table("verl", functions_of(globals(), *map(vars, _PARTS)))


@cache
def verl_sft_table(name: str = "sft_trainer") -> Table:
    """verl's keys of fine-tuning, with the defaults of fsdp_sft_trainer (2025) or sft_trainer (today)."""
    return read_table("verl_sft", functions_of(globals(), *map(vars, _PARTS)), kind=name)


def migrate_verl(settings: Sequence[Found], *, engine: object = None) -> Migration:
    """Migration of every setting of a verl script or YAML.

    Args:
        settings: of the script.
        engine: rollout.engine, where it is given beside them.
    """
    table, settings = verl_table(), verl_correction.in_its_section(settings)
    values = {
        setting.key: setting.value for setting in settings if setting.kind == "set" and not setting.unresolved
    }
    facts = Facts(values, table.defaults)
    defaults, written = dict(table.defaults), list(table.written_out)
    defaults[engines.ENGINE] = engines.engine_of(values.get(f"{R}.name"), engine)
    if verl_early.is_early(facts):
        early = verl_early.defaults_of_early(facts)
        defaults |= early
        written += [key for key in early if key not in written]
    if verl_prime.is_prime(facts):
        defaults |= verl_prime.DEFAULTS
        written += verl_prime.WRITTEN
        mini_batch = Facts(values, defaults).get(f"{A}.ppo_mini_batch_size")
        defaults["reward_model.mini_batch_size"] = mini_batch
    if verl_agent.plays(facts):
        written.remove(f"{R}.n")
    facts = Facts(values, defaults)
    inherited = dict(_inherited(facts, defaults))
    if uses_reference(facts):
        keys = [setting.key for setting in settings if setting.kind == "set"]
        inherited |= verl_megatron.reference_settings(facts, keys, table.rows)
    if uses_critic(facts):
        inherited |= verl_megatron.sizes_in_shared_groups(facts, "critic")
    if facts.get("reward_model.enable") is True:
        inherited |= verl_megatron.sizes_in_shared_groups(facts, "reward_model")
    follows = {key: value for key, value in inherited.items() if not facts.is_given(key)}
    return apply_table(settings, table, defaults=defaults | follows, write_out=(*written, *follows))


def migrate_verl_sft(settings: Sequence[Found]) -> Migration:
    """Migration of every setting of a fine-tuning script."""
    values = {setting.key: setting.value for setting in settings if setting.kind == "set"}
    of_2025 = ("model.partial_pretrain", "data.response_key", "data.prompt_key", "data.multiturn.enable")
    table = verl_sft_table("fsdp_sft_trainer" if any(key in values for key in of_2025) else "sft_trainer")
    without = {"data.max_length", "model.lora_rank"}  # ours are the same
    if values.get("model.lora_rank") in (None, 0):
        without.add("model.lora_alpha")
    if values.get("data.multiturn.enable") is True:
        without |= {"data.prompt_key", "data.response_key"}
    write_out = [key for key in table.defaults if key not in without]
    return apply_table(settings, table, defaults=table.defaults, write_out=write_out)


def verl_command(settings: Sequence[Found]) -> str:
    """The command of strop for a verl script of reinforcement learning: train, or eval."""
    values = {
        setting.key: setting.value for setting in settings if setting.kind == "set" and not setting.unresolved
    }
    alone = values.get("trainer.val_only") is True and values.get("trainer.val_before_train") is not False
    return "eval" if alone else "train"


def _inherited(facts: Facts, defaults: Any) -> Iterator[tuple[str, Any]]:
    """Defaults that differ from ours in the setting at hand, or that follow other keys."""
    budget = f"{A}.ppo_max_token_len_per_gpu"
    if facts.get(f"{A}.use_dynamic_bsz") is True and facts.is_given(budget) and uses_reference(facts):
        yield f"{REF}.log_prob_max_token_len_per_gpu", facts.get(budget)
    written = []
    if uses_critic(facts):
        yield "critic.ppo_mini_batch_size", facts.get(f"{A}.ppo_mini_batch_size")
        yield "critic.ppo_epochs", facts.get(f"{A}.ppo_epochs")
        written.append("critic.optim.lr")
        if is_dynamic(facts, "critic"):
            written.append("critic.ppo_max_token_len_per_gpu")
    for section in (M, "critic.model"):
        if facts.get(f"{section}.lora_rank") not in (0, None) and (section == M or uses_critic(facts)):
            written.append(f"{section}.lora_alpha")
    loss = str(facts.get(f"{A}.policy_loss.loss_mode"))
    if loss.startswith("dppo"):
        written.append(f"{A}.clip_ratio_c")
    if loss == "kl_cov":
        written.append(f"{A}.policy_loss.ppo_kl_coef")
    yield from _passes(facts)
    if has_tools(facts):
        written.append(f"{R}.multi_turn.format")
    if facts.get("algorithm.filter_groups.enable") is True:
        written.append("algorithm.filter_groups.metric")
    yield from ((key, defaults[key]) for key in written)


def _passes(facts: Facts) -> Iterator[tuple[str, Any]]:
    """One sample per pass, where nothing says how many and one has more tokens than ours take by default."""
    try:
        if longest(facts) <= EngineConfig().max_tokens_per_device:
            return
    except UnreadableError:  # a limit that nobody knows; its own row says so
        return
    sizes = ("micro_batch_size_per_gpu", "micro_batch_size")
    for role, used, prefix in (
        ("actor", True, f"{A}.ppo_"),
        ("critic", uses_critic(facts), "critic.ppo_"),
        ("reference", uses_reference(facts), f"{REF}.log_prob_"),
    ):
        budget = f"{prefix}max_token_len_per_gpu"
        if not used or any(facts.is_given(f"{prefix}{size}") for size in sizes) or facts.is_given(budget):
            continue
        if not is_dynamic(facts, role):
            yield f"{prefix}micro_batch_size_per_gpu", 1


# Conditions.


def uses_reference(facts: Facts) -> bool:
    """A frozen reference model is loaded."""
    in_reward = facts.get("algorithm.use_kl_in_reward") is True and not verl_prime.is_prime(facts)
    return facts.get(f"{A}.use_kl_loss") is True or in_reward


def uses_critic(facts: Facts) -> bool:
    """A value model is loaded."""
    return bool(facts.get("algorithm.adv_estimator") == "gae")


def clips_beside_the_optimizer(facts: Facts) -> bool:
    """Gradients are clipped by a key of the actor, not of its optimizer."""
    return not facts.is_given(f"{A}.optim.clip_grad")


def balances_experts(facts: Facts) -> bool:
    """Routers of verl's Megatron engine have a load-balancing loss; verl sets none where nothing is said."""
    kind = facts.get(f"{A}.megatron.override_transformer_config.moe_router_load_balancing_type")
    return kind not in (None, "none")


def has_tools(facts: Facts) -> bool:
    """Tools or agent loops are named, readable or not."""
    keys = ("multi_turn.tool_config_path", "multi_turn.function_tool_path", "agent.agent_loop_config_path")
    return any(_is_named(facts, f"{R}.{key}") for key in keys)


def has_turns(facts: Facts) -> bool:
    """Somebody answers the model: tools, agent loops or a user."""
    return has_tools(facts) or _is_named(facts, f"{R}.multi_turn.interaction_config_path")


def _is_named(facts: Facts, key: str) -> bool:
    return facts.is_unread(key) or bool(facts.get(key))


# Data, engine, command line.


def truncation(key: str, value: object, facts: Facts) -> Outcome:
    """Truncation of over-long prompts where they are not dropped; read in 2025, and not any more in 2026."""
    if facts.get("data.filter_overlong_prompts") is True:
        return skip(
            "read with filter_overlong_prompts=false alone: prompts over the limit are dropped before"
        )
    if value not in ("error", "left", "right", "middle"):
        return refuse("use error, left, right or middle: data.truncation")
    return many({"data.truncation": value}, "as in verl's versions of 2025; those of 2026 do not read it")


def sample_limit(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """At most so many rows."""
    if value is None or (isinstance(value, int) and value < 0):
        return skip("no limit there, none here")
    return many({ours: integer(value)}, "spread over the rows, not the first ones")


def generated(key: str, value: object, facts: Facts) -> Outcome:
    """Prompts that are drawn for a batch."""
    if value is None or value == facts.get("data.train_batch_size"):
        return skip("equal to data.train_batch_size")
    if verl_async.is_fully_async(facts):
        return skip("prompts are begun one by one, as there is room")
    if facts.get("algorithm.filter_groups.enable") is True:
        return many({"algorithm.filter_groups.prompts_per_round": integer(value)})
    return refuse(
        f"without filter_groups there every batch has data.gen_batch_size prompts, and all of them are trained: set "
        f"data.train_batch_size={value} and leave it out"
    )


def strategy(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """Engine of a role."""
    if value in ("fsdp", "fsdp2"):
        return skip("strop trains with FSDP2")
    if value != "megatron":
        return refuse(f"{_OTHER_ENGINES}: set strategy=fsdp2")
    if ours.startswith("reference") and not uses_reference(facts):
        return skip("no reference model is loaded")
    return many({f"{ours}.kind": "megatron"}, "install strop[megatron]")


def scoring_strategy(key: str, value: object, facts: Facts) -> Outcome:
    """Engine of a reward model, or of PRIME's, which learns."""
    role = "prm" if verl_prime.is_prime(facts) else "reward_model"
    return strategy(key, value, facts, ours=f"{role}.engine")


def precision(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """The precision of an engine; the policy's is that of every role."""
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    names |= {name: name for name in names.values()}
    if not ours:
        return skip("follows model.dtype")
    return many({ours: names[value]}) if value in names else refuse("use bfloat16, float16 or float32")


def saved(key: str, value: object, facts: Facts) -> Outcome:
    """Contents of a checkpoint."""
    if isinstance(value, list) and "hf_model" in value:
        return many({"run.hf_model": "always"})
    return skip("a checkpoint always holds all that a resume needs")


def copied(key: str, value: object, facts: Facts) -> Outcome:
    """A folder elsewhere that gets the checkpoints."""
    text = str(value)
    if "://" not in text and not text.startswith("/"):
        return refuse("say where it is, by a URL or an absolute path: run.copy_to")
    note = "each checkpoint is copied there while training goes on, into a folder that is named like the run"
    return many({"run.copy_to": text if "://" in text else f"file://{text}"}, note)


def value_aggregation(key: str, value: object, facts: Facts) -> Outcome:
    """Aggregation of the value loss."""
    if value is None or value == facts.get(key.replace("critic.", f"{A}.")):
        return skip("the value loss is aggregated like the policy's")
    return refuse("the value loss is aggregated like the policy's: algorithm.loss_agg_mode")


def trackers(value: object, facts: Facts) -> Outcome:
    """The trackers of a list of verl's loggers."""
    names = {"console": "console", "file": "jsonl", **installed_trackers()}
    ours, missing = tracker_names(value, names)
    ours += [name for name in ("jsonl", "tensorboard")[: 1 + bool(missing)] if name not in ours]
    note = f"{without_trackers(missing)}; metrics.jsonl and TensorBoard instead" if missing else ""
    return many({"trainer.trackers": ours}, note or "metrics.jsonl is what `strop doctor RUN` reads")


def shown(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """Name of the run for trackers."""
    return shown_as(value, facts.get("trainer.logger"), ours=ours)


def config_name(key: str, value: object, facts: Facts) -> Outcome:
    """A configuration file that a script names."""
    if str(value).endswith(GIVEN):
        return skip("read with the other files")
    name = str(value).removesuffix(".yaml")
    if name in _KNOWN_CONFIGS or (name == "prime_trainer" and verl_prime.is_prime(facts)):
        return skip("its defaults are known here")
    if name == "ppo_megatron_trainer":
        return _on_megatron(facts)
    raise UnreadableError(f"what {name} sets is not in this file: strop migrate verl {name}.yaml SCRIPT")


def model_engine(key: str, value: object, facts: Facts) -> Outcome:
    """Engine of every role, by which verl chooses their configuration files."""
    if value == "megatron":
        return _on_megatron(facts)
    if value not in (None, "dp"):
        return refuse(f"{_OTHER_ENGINES}: set model_engine=dp")
    return skip("strop trains with FSDP2")


def _on_megatron(facts: Facts) -> Outcome:
    roles = ["actor"] + ["reference"] * uses_reference(facts) + ["critic"] * uses_critic(facts)
    roles += ["reward_model"] * (facts.get("reward_model.enable") is True)
    return many({f"{role}.engine.kind": "megatron" for role in roles}, "its strategy is megatron")


# Sampling and agents.


def rounds(key: str, value: object, facts: Facts) -> Outcome:
    """Rounds of drawing prompts for a batch; read by the DAPO recipe of 2025, which ends the run there."""
    if facts.get("algorithm.filter_groups.enable") is not True:
        return skip("read with filter_groups.enable=true alone")
    if value is None or integer(value) <= 0:
        return skip("no limit there; here a step has algorithm.filter_groups.max_rounds at most")
    ours = {"algorithm.filter_groups.max_rounds": integer(value), "algorithm.filter_groups.at_limit": "stop"}
    return many(ours, "as in verl's versions of 2025; those of 2026 do not read it")


def interactions(key: str, value: object, facts: Facts) -> Outcome:
    """A file of users that answer the model."""
    ours = {"agent.interactions": value}
    if facts.get(f"{R}.agent.default_agent_loop") in (None, "tool_agent", "single_turn_agent"):
        ours["agent.default_agent"] = "interaction_agent"
    return many(ours, "its classes derive from strop.agents.interactions.BaseInteraction here")


def turns(key: str, value: object, facts: Facts) -> Outcome:
    """Several turns are on: in versions of 2025 tools played every row then, also one that names no agent."""
    files = ("tool_config_path", "function_tool_path")
    has_tools = any(facts.get(f"{R}.multi_turn.{file}") for file in files)
    has_user = _is_named(facts, f"{R}.multi_turn.interaction_config_path")
    if value is True and has_tools and not has_user and not facts.is_given(f"{R}.agent.default_agent_loop"):
        note = "rows that name no agent have the tools, as in verl's versions of 2025"
        return many({"agent.default_agent": "tool_agent"}, note)
    return skip(
        "what multi_turn names is played, as in verl's versions of 2026; those of 2025 played it where this was true "
        "alone"
    )


def default_agent(key: str, value: object, facts: Facts) -> Outcome:
    """Agent of the rows that name none."""
    has_user = _is_named(facts, f"{R}.multi_turn.interaction_config_path")
    if has_user and value in ("tool_agent", "single_turn_agent"):
        return skip("with interactions it is interaction_agent, which carries out tools too")
    return many({"agent.default_agent": value})
