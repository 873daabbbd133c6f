"""The roles of verl that run a model: actor, reference and critic. Their losses are in `losses`."""

from __future__ import annotations

from typing import Any

from strop.config.migration.outcomes import Facts, Outcome, many, refuse, skip
from strop.config.migration.rules import NotNeeded, Refused, To, Unless
from strop.config.migration.tables import Entry, only_if, same, under
from strop.config.migration.values import integer, model_path, number
from strop.config.migration.verl.batches import (
    micro_batch,
    samples_per_update,
    token_budget,
    updates_per_step,
)
from strop.config.migration.verl.engine import MEGATRON, engine_entries, optimizer_entries
from strop.config.migration.verl.facts import (
    CRITIC_DYNAMIC,
    DYNAMIC,
    REF,
    REFERENCE_DYNAMIC,
    A,
    uses_critic,
    uses_reference,
)
from strop.config.migration.verl.model import model_entries

NOTHING = "does nothing in verl either"
PROFILER = NotNeeded("profiling is set up outside strop")
_LOG_PROBS = NotNeeded("log-probs are computed within actor.engine.max_tokens_per_device")
_VALUES = NotNeeded("values are computed within critic.engine.max_tokens_per_device")
_ENTROPY = NotNeeded("always computed in chunks, and recomputed for the gradient")
_ORDER = Unless(
    (False,), "samples of a step are cut into optimizer steps in the order of their prompts", "off there too"
)
_TOKENS = NotNeeded("batches are always cut by tokens: engine.max_tokens_per_device")
_ROUTING = Unless(("disabled",), "expert routing is not replayed", "off there too")
_OTHER_ENGINES = (
    *same(Refused(MEGATRON), "megatron.* megatron veomni.* torchtitan.* automodel.*"),
    Entry("strategy", Unless(("fsdp", "fsdp2"), MEGATRON, "strop trains with FSDP2")),
)


def _saved(key: str, value: Any, facts: Facts) -> Outcome:
    if isinstance(value, list) and "hf_model" in value:
        return many({"run.hf_model": "always"})
    return skip("a checkpoint always holds all that a resume needs")


def _value_aggregation(key: str, value: Any, facts: Facts) -> Outcome:
    same_as = key.replace("critic.", f"{A}.")
    if value is None or value == facts.get(same_as):
        return skip("the value loss is aggregated like the policy's")
    return refuse("the value loss is aggregated like the policy's: algorithm.loss_agg_mode")


def _policy_updates(facts: Facts) -> int:
    return updates_per_step(facts, f"{A}.ppo_mini_batch_size", f"{A}.ppo_epochs")


def _critic_updates(facts: Facts) -> int:
    return updates_per_step(facts, "critic.ppo_mini_batch_size", "critic.ppo_epochs")


_ACTOR_BUDGET = "actor.engine.max_tokens_per_device"
ACTOR = (
    *under(
        A,
        *_OTHER_ENGINES,
        Entry("ppo_mini_batch_size", samples_per_update("actor.samples_per_update")),
        Entry("ppo_micro_batch_size", micro_batch(_ACTOR_BUDGET, DYNAMIC, over_all_devices=True)),
        Entry("ppo_micro_batch_size_per_gpu", micro_batch(_ACTOR_BUDGET, DYNAMIC)),
        Entry("ppo_max_token_len_per_gpu", token_budget(_ACTOR_BUDGET, DYNAMIC)),
        Entry("use_dynamic_bsz", _TOKENS),
        *same(
            _LOG_PROBS,
            "ppo_infer_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu infer_max_token_len_per_gpu",
        ),
        Entry("ppo_epochs", To("actor.epochs", integer)),
        Entry("shuffle", _ORDER),
        Entry("data_loader_seed", NotNeeded("samples are cut in a fixed order")),
        Entry("grad_clip", NotNeeded(
            f"{NOTHING} (it reads actor.optim.clip_grad); ours is actor.optim.max_grad_norm"
        )),
        Entry("ulysses_sequence_parallel_size", To("actor.engine.sequence_parallel", integer)),
        Entry("use_torch_compile", NotNeeded("it compiles the entropy; ours is computed in chunks")),
        *same(
            _ENTROPY, "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing"
        ),
        *same(NotNeeded("micro-batches are packed, of any length"), "pad_to_length pad_to_length_bucket"),
        Entry("use_fused_kernels", NotNeeded("log-probs never need the logits of all tokens at once")),
        Entry("use_remove_padding", NotNeeded("sequences are always packed, never padded")),
        Entry("use_prefix_grouper", NotNeeded("samples of one prompt share it")),
        Entry("calculate_entropy", NotNeeded("the entropy is always measured")),
        *same(
            NotNeeded("computed when the estimator needs it"),
            "calculate_sum_pi_squared sum_pi_squared_checkpointing",
        ),
        *same(NotNeeded(NOTHING), "freeze_vision_tower use_rollout_log_probs"),
        Entry("rollout_n", NotNeeded("follows rollout.n")),
        *same(_saved, "checkpoint.save_contents checkpoint.contents"),
        Entry("checkpoint.load_contents", NotNeeded("a resume loads everything")),
        Entry("checkpoint.async_save", To("run.async_save")),
        Entry("checkpoint.*", NotNeeded("checkpoints are set under run")),
        *same(NotNeeded(NOTHING), "router_replay.record_file router_replay.replay_file"),
        Entry("router_replay.mode", _ROUTING),
        Entry("profiler.*", PROFILER),
        Entry("qat.enable", Unless((False,), "weights are not quantized in training: leave it off", "off there too")),
        Entry("qat.*", NotNeeded("read with qat.enable=true alone")),
        Entry("mtp.*", NotNeeded("multi-token prediction is neither trained nor used")),
    ),
    *optimizer_entries(f"{A}.optim", "actor.optim", _policy_updates),
    *engine_entries(f"{A}.fsdp_config", "actor.engine", is_policy=True),
)  # fmt: skip
"""What becomes of the keys of `actor_rollout_ref.actor`, but for its losses."""

_REFERENCE_BUDGET = "reference.engine.max_tokens_per_device"
REFERENCE = only_if(
    uses_reference,
    "no reference model is loaded without a KL term",
    (
        *under(
            REF,
            *_OTHER_ENGINES,
            Entry("model.path", To("reference.path", model_path("reference.path"))),
            Entry("model", NotNeeded("the reference is model.path unless reference.path names another")),
            Entry("model.*", NotNeeded("the reference is read as the policy is")),
            Entry("log_prob_micro_batch_size", micro_batch(
                _REFERENCE_BUDGET, REFERENCE_DYNAMIC, over_all_devices=True
            )),
            Entry("log_prob_micro_batch_size_per_gpu", micro_batch(_REFERENCE_BUDGET, REFERENCE_DYNAMIC)),
            Entry("log_prob_max_token_len_per_gpu", token_budget(_REFERENCE_BUDGET, REFERENCE_DYNAMIC)),
            Entry("log_prob_use_dynamic_bsz", _TOKENS),
            Entry("ulysses_sequence_parallel_size", To("reference.engine.sequence_parallel", integer)),
            Entry("use_torch_compile", NotNeeded("it compiles the entropy; ours is computed in chunks")),
            *same(
                NotNeeded("a reference has no entropy to compute"),
                "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing",
            ),
            *same(NotNeeded("micro-batches are packed, of any length"), "pad_to_length pad_to_length_bucket"),
            Entry("rollout_n", NotNeeded("follows rollout.n")),
            Entry("router_replay.mode", _ROUTING),
            Entry("router_replay.*", NotNeeded("expert routing is not replayed")),
            Entry("profiler.*", PROFILER),
        ),
        *engine_entries(f"{REF}.fsdp_config", "reference.engine"),
    ),
)  # fmt: skip
"""What becomes of the keys of `actor_rollout_ref.ref`."""

_CRITIC_BUDGET = "critic.engine.max_tokens_per_device"
_APART = "a critic of its own processes is resources.apart: {critic: N}"
CRITIC = only_if(
    uses_critic,
    "no critic is loaded with this algorithm.adv_estimator",
    (
        *under(
            "critic",
            *_OTHER_ENGINES,
            Entry("enable", Unless((True,), "gae needs a critic", "gae brings a critic along")),
            Entry("ppo_mini_batch_size", samples_per_update("critic.samples_per_update")),
            Entry("ppo_micro_batch_size", micro_batch(_CRITIC_BUDGET, CRITIC_DYNAMIC, over_all_devices=True)),
            Entry("ppo_micro_batch_size_per_gpu", micro_batch(_CRITIC_BUDGET, CRITIC_DYNAMIC)),
            Entry("ppo_max_token_len_per_gpu", token_budget(_CRITIC_BUDGET, CRITIC_DYNAMIC)),
            Entry("use_dynamic_bsz", _TOKENS),
            *same(
                NotNeeded(NOTHING),
                "forward_micro_batch_size forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu",
            ),
            *same(_VALUES, "ppo_infer_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu"),
            Entry("ppo_epochs", To("critic.epochs", integer)),
            Entry("shuffle", _ORDER),
            Entry("data_loader_seed", NotNeeded("samples are cut in a fixed order")),
            Entry("grad_clip", To("critic.optim.max_grad_norm", number)),
            Entry("cliprange_value", To("algorithm.cliprange_value", number)),
            *same(_value_aggregation, "loss_agg_mode loss_scale_factor"),
            Entry("ulysses_sequence_parallel_size", To("critic.engine.sequence_parallel", integer)),
            Entry("rollout_n", NotNeeded("follows rollout.n")),
            *same(Unless((0,), _APART, "beside the policy"), "nnodes n_gpus_per_node"),
            Entry("checkpoint.*", NotNeeded("checkpoints hold every role")),
            Entry("profiler.*", PROFILER),
        ),
        *model_entries("critic.model", "critic", engine="critic.engine", has_own_template=False),
        *optimizer_entries("critic.optim", "critic.optim", _critic_updates),
        *engine_entries("critic.model.fsdp_config", "critic.engine"),
        *engine_entries("critic.fsdp", "critic.engine"),
        *engine_entries("critic.fsdp_config", "critic.engine"),
    ),
)  # fmt: skip
"""What becomes of the keys of `critic`."""
