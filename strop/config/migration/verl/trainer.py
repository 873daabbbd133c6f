"""The section `trainer` of verl, the command line itself, and sections beside the training."""

from __future__ import annotations

from typing import Any

from strop.config.migration.found import GIVEN
from strop.config.migration.outcomes import Facts, Outcome, UnreadableError, many, skip
from strop.config.migration.rules import NotNeeded, Refused, To, Unless
from strop.config.migration.tables import Entry, same, under
from strop.config.migration.values import choice, if_set, integer, never_below_zero, tracker_names
from strop.config.migration.verl.facts import num_ranks, uses_critic

_NAMED = NotNeeded("the run folder is what --out names: strop train --out runs/NAME")
_SAMPLES = NotNeeded("samples are in the run folder: strop samples RUN")
_PROFILER = NotNeeded("profiling is set up outside strop")
_YAML = NotNeeded("give the YAML file itself: strop migrate verl FILE.yaml SCRIPT")
_ASYNC = "asynchronous training is not there yet: set trainer.v1.trainer_mode=sync"


def _ranks(key: str, value: Any, facts: Facts) -> Outcome:
    ranks = num_ranks(facts)
    if ranks == 1:
        return many({"resources.ranks": 1})
    return many(
        {"resources.ranks": ranks, "resources.runtime": "ray"},
        f"{facts.get('trainer.nnodes')} nodes x {facts.get('trainer.n_gpus_per_node')} devices",
    )


def trackers(value: Any, facts: Facts) -> Outcome:
    """The trackers of a list of verl's loggers."""
    known = {"console": "console", "tensorboard": "tensorboard", "file": "jsonl"}
    ours, missing = tracker_names(value, known)
    if missing:
        ours += [name for name in ("jsonl", "tensorboard") if name not in ours]
    note = f"no tracker for {', '.join(missing)}: metrics.jsonl and TensorBoard instead" if missing else ""
    return many({"trainer.trackers": ours or ["jsonl"]}, note)


def _critic_warmup(value: Any, facts: Facts) -> Any:
    return value if uses_critic(facts) or not value else skip("there is no critic with this estimator")


def _config_name(key: str, value: Any, facts: Facts) -> Outcome:
    name = str(value)
    if name.removesuffix(".yaml") in ("ppo_trainer", "sft_trainer", "sft_trainer_engine"):
        return skip("its defaults are known here")
    if name.endswith(GIVEN):
        return skip("read with the other files")
    raise UnreadableError(f"what {name} sets is not in this file: strop migrate verl {name}.yaml SCRIPT")


ENTRIES = under(
    "trainer",
    Entry("total_epochs", To("trainer.num_epochs", integer)),
    Entry("total_training_steps", To("trainer.max_steps", if_set(integer))),
    Entry("critic_warmup", To("trainer.critic_warmup", _critic_warmup)),
    Entry("logger", To("trainer.trackers", trackers)),
    Entry("save_freq", To("run.save_every", never_below_zero)),
    Entry("test_freq", To("eval.every", never_below_zero)),
    Entry("val_before_train", To("eval.before_train")),
    Entry("val_on_last_step", NotNeeded("the last step is always validated")),
    Entry("val_only", Unless((False,), "for validation alone there is `strop eval`", "off there too")),
    Entry("nnodes", To("resources.nodes", integer)),
    Entry("n_gpus_per_node", _ranks),
    Entry(
        "device",
        To(
            "resources.device",
            choice({"cuda": "cuda", "cpu": "cpu", "npu": "npu"}, instead="use cuda, npu or cpu"),
        ),
    ),
    Entry("max_actor_ckpt_to_keep", To("run.keep_last", if_set(integer))),
    Entry("max_critic_ckpt_to_keep", NotNeeded("a checkpoint holds every role: run.keep_last")),
    *same(_NAMED, "project_name experiment_name default_local_dir"),
    Entry("default_hdfs_dir", Unless((), "runs are written to a local folder: copy it", "not set")),
    Entry(
        "resume_mode", NotNeeded("strop train --resume continues a run, and without it nothing is resumed")
    ),
    Entry("resume_from_path", Unless((), "strop train --resume --out RUN continues that run", "not set")),
    Entry(
        "checkpoint_callback_class",
        Unless((), "no code of yours runs at a checkpoint: watch the folder", "not set"),
    ),
    Entry("del_local_ckpt_after_load", Unless((False,), "checkpoints go by run.keep_last", "off there too")),
    *same(_SAMPLES, "log_val_generations rollout_data_dir validation_data_dir"),
    *same(NotNeeded("work is always balanced over the ranks"), "balance_batch balance_keep_minibatch"),
    Entry("esi_redundant_time", NotNeeded("does nothing in verl either")),
    Entry("ray_wait_register_center_timeout", NotNeeded("ours is resources.start_timeout_s")),
    *same(NotNeeded("there is one implementation"), "use_legacy_worker_impl use_v1"),
    Entry("v1.trainer_mode", Unless(("sync",), _ASYNC, "as here")),
    Entry("v1.sampler.sync_refill_failed_groups", NotNeeded("the place of a failed sample stays empty")),
    *same(
        Unless((), "a sampler of finished answers has no place here", "not set"),
        "v1.sampler.custom_sampler.path v1.sampler.custom_sampler.name",
    ),
    Entry("v1.*", NotNeeded("read by verl's asynchronous trainers alone")),
    *same(_PROFILER, "npu_profile.* profile_steps worker_nsight_options.* controller_nsight_options.*"),
)
"""What becomes of the keys of `trainer`."""

_SKIP = Unless((False,), "rollouts are never replayed from files: leave it out", "off there too")
REST = (
    Entry("*._target_", NotNeeded("names a class of verl's own")),
    Entry("_target_", NotNeeded("names a class of verl's own")),
    Entry("$@", NotNeeded("settings go after the command here too: strop train --config FILE key=value")),
    *same(_YAML, "--config-path --config-dir"),
    Entry("--config-name", _config_name),
    Entry("defaults", NotNeeded("the defaults of verl are known here; give other files it names as well")),
    *same(NotNeeded("strop writes nothing but its run folder"), "hydra.* hydra"),
    *same(NotNeeded("ours are resources.address and resources.cpus_per_rank"), "ray_init.* ray_kwargs.*"),
    *same(_PROFILER, "global_profiler.* profiler.*"),
    Entry("transfer_queue.*", NotNeeded("columns go from worker to worker")),
    *same(_SKIP, "skip.rollout.enable skip.rollout_tq.enable skip.async_rollout.enable"),
    Entry("skip.*", NotNeeded("read where rollouts are replayed from files")),
    Entry("async_training.*", Refused("asynchronous training is not there yet: use main_ppo's settings")),
    Entry("torchrun.*", NotNeeded("trainer.n_gpus_per_node and trainer.nnodes say it")),
    Entry(
        "model_engine", Unless(("dp",), "strop trains with FSDP2: set model_engine=dp", "there is one engine")
    ),
)
"""What becomes of what else stands on the command line, and of the sections beside the training."""

ROOT = under(
    "actor_rollout_ref",
    Entry(
        "hybrid_engine",
        Unless((True,), "trainer and rollout share their processes, or resources.apart", "as here"),
    ),
    Entry("nccl_timeout", NotNeeded("does nothing in verl either; ours is resources.call_timeout_s")),
)
"""What becomes of the keys right below `actor_rollout_ref`."""
