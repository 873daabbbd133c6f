"""Optimizers and engines: the sections `optim` and `fsdp_config` that every trained role of verl has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strop.config.migration.outcomes import Facts, many, refuse, skip
from strop.config.migration.rules import NotNeeded, To, Unless, WhenTrue
from strop.config.migration.tables import Entry, same, under
from strop.config.migration.values import choice, if_set, integer, number, pair

MEGATRON = "strop trains with FSDP2, and not with Megatron, VeOmni or TorchTitan: set strategy=fsdp2"
SCHEDULE = choice(
    {"constant": "constant", "cosine": "cosine", "linear": "linear", "WSD": "wsd", "wsd": "wsd"},
    instead="use constant, linear, cosine or wsd",
)
_OPTIMIZER = choice(
    {
        **dict.fromkeys(("AdamW", "adamw", "_AdamW", "Adam", "adam"), "adamw"),
        **dict.fromkeys(("AdamW8bit", "adamw_8bit"), "adamw_8bit"),
        **dict.fromkeys(("Muon", "muon"), "muon"),
    },
    instead="use adamw, adamw_8bit or muon",
)


def optimizer_entries(
    section: str,
    ours: str,
    updates: Callable[[Facts], int],
    *,
    total_steps: str = "trainer.total_training_steps",
) -> tuple[Entry, ...]:
    """What becomes of the keys of an optimizer.

    Args:
        section: their section.
        ours: ours.
        updates: optimizer steps per step of training, which is what verl's schedules count.
        total_steps: their key with the steps of the whole training.
    """

    def warmup(value: Any, facts: Facts) -> Any:
        steps = integer(value, facts)
        if steps <= 0:
            return skip("no warm-up there, none here")
        per_step = updates(facts)
        note = f"{steps} steps of {per_step} optimizer steps, which strop counts" if per_step > 1 else ""
        return many({f"{ours}.warmup_steps": steps * per_step}, note)

    def share(value: Any, facts: Facts) -> Any:
        if not value:
            return skip("no warm-up there, none here")
        total = facts.get(total_steps)
        if not isinstance(total, int):
            return refuse(f"the number of steps is known only with the data: set {ours}.warmup_steps")
        steps = int(float(value) * total) * updates(facts)
        return many({f"{ours}.warmup_steps": steps}, f"{value} of {total} steps")

    steady = Unless(
        (0.9,), f"the share of the steps that fall is {ours}.decay_share, of all steps", "as by default"
    )
    scheduled = Unless(
        (0, 0.0), f"the schedule's numbers are {ours}.warmup_steps and {ours}.min_lr_ratio", "off"
    )
    return under(
        section,
        Entry("lr", To(f"{ours}.lr", number)),
        *same(To(f"{ours}.warmup_steps", if_set(warmup)), "lr_warmup_steps"),
        *same(To(f"{ours}.warmup_steps", if_set(share)), "lr_warmup_steps_ratio warmup_steps_ratio"),
        Entry("total_training_steps", NotNeeded("the number of steps follows from data and epochs")),
        Entry("weight_decay", To(f"{ours}.weight_decay", number)),
        Entry("betas", To(f"{ours}.betas", pair)),
        Entry("eps", To(f"{ours}.eps", number)),
        Entry("clip_grad", To(f"{ours}.max_grad_norm", number)),
        Entry("min_lr_ratio", To(f"{ours}.min_lr_ratio", if_set(number))),
        Entry("num_cycles", Unless((0.5,), "the cosine goes down once", "half a cosine")),
        *same(
            To(f"{ours}.schedule", SCHEDULE), "lr_scheduler_type warmup_style lr_scheduler lr_decay_style"
        ),
        Entry("lr_wsd_stable_steps_ratio", steady),
        Entry("optimizer", To(f"{ours}.name", _OPTIMIZER)),
        Entry("optimizer_impl", NotNeeded("the name of the optimizer says it")),
        Entry("override_optimizer_config", Unless(({},), f"its settings are under {ours}", "empty there too")),
        Entry("zero_indexed_step", NotNeeded("the first step already warms up")),
        *same(scheduled, "lr_warmup_init min_lr"),
        *same(
            NotNeeded("belongs to Megatron's optimizer"),
            "lr_decay_steps weight_decay_incr_style lr_wsd_decay_style lr_wsd_decay_steps "
            "use_checkpoint_opt_param_scheduler use_layer_wise_distributed_optimizer muon_momentum muon_nesterov "
            "muon_split_qkv muon_scale_mode muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_fp32_matmul_prec "
            "muon_extra_scale_factor muon_scalar_optimizer",
        ),
    )  # fmt: skip


def engine_entries(section: str, ours: str, *, is_policy: bool = False) -> tuple[Entry, ...]:
    """What becomes of the keys of a role's FSDP engine; `is_policy` where its precision is that of model.dtype."""

    def precision(value: Any, facts: Facts) -> Any:
        names = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
        if value in ("float16", "fp16"):
            return refuse("float16 needs loss scaling, which strop does not do: use bfloat16")
        if not is_policy:
            return skip("follows model.dtype")
        return names.get(value, refuse("use bfloat16 or float32"))

    def shard_size(value: Any, facts: Facts) -> int:
        return max(0, integer(value, facts))

    offload_idle = WhenTrue(
        (("resources.offload_idle", True),),
        "models stay where they are, as by default",
        "of every role while others work",
    )
    return under(
        section,
        *same(offload_idle, "param_offload offload_params cpu_offload"),
        Entry("optimizer_offload", WhenTrue(
            ((f"{ours}.offload", "optimizer"),), "the state stays where it is, as by default"
        )),
        Entry("offload_policy", WhenTrue(((f"{ours}.offload", "all"),), "off there too")),
        Entry("grad_offload", NotNeeded("gradients go with the parameters")),
        Entry("reshard_after_forward", To(f"{ours}.reshard_after_forward")),
        Entry("use_no_sync_for_gradient_accumulation", To(f"{ours}.gradient_sync", choice(
            {True: "last", False: "each"}, instead="use last or each"
        ))),
        Entry("fsdp_size", To(f"{ours}.shard_size", shard_size, note="0: all ranks")),
        *same(To("model.dtype", if_set(precision)), "dtype mixed_precision.param_dtype"),
        Entry("mixed_precision.*", NotNeeded("gradients are reduced in float32")),
        Entry("mixed_precision", Unless(({},), "precision is model.dtype", "empty there too")),
        Entry("model_dtype", Unless(
            ("fp32", "float32", "bfloat16", "bf16"), "master weights are in float32: set fp32", "float32"
        )),
        Entry("ulysses_sequence_parallel_size", To(f"{ours}.sequence_parallel", integer)),
        Entry("strategy", Unless(("fsdp", "fsdp2"), MEGATRON, "strop trains with FSDP2")),
        Entry("qat.enable", Unless((False,), "weights are not quantized in training: leave it off", "off there too")),
        *same(NotNeeded("read with qat.enable=true alone"), "qat.*"),
        *same(NotNeeded("it compiles the entropy; ours is computed in chunks"), "use_torch_compile"),
        *same(
            NotNeeded("always computed in chunks"),
            "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing",
        ),
        *same(NotNeeded("micro-batches are packed, of any length"), "pad_to_length pad_to_length_bucket"),
        *same(NotNeeded("strop's results do not depend on it: trainer.seed"), "seed full_determinism"),
        *same(
            NotNeeded("a detail of verl's FSDP wrapping; ours has no such choice"),
            "wrap_policy wrap_policy.* forward_prefetch use_orig_params forward_only turbo_config.*",
        ),
    )  # fmt: skip
