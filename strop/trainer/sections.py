"""The sections of the root configuration that belong to the loop itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from strop.config.sections import section
from strop.utils.device import OF_EACH_PROCESS, VISIBILITY_VARIABLES, check_device_name
from strop.utils.field_types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
)
from strop.utils.remote_path import is_url
from strop.utils.sanitize import is_secret

RoleName = Literal["actor", "rollout", "reference", "critic", "teacher", "prm", "reward_model"]
APART_ROLES: tuple[RoleName, ...] = ("rollout", "reference", "critic", "teacher", "prm", "reward_model")
"""Roles that can have processes of their own; the actor is always in the main pool."""


SECTION_OF_COMMAND = {"sft": "sft", "prefer": "prefer", "dpo": "prefer", "reward-model": "prefer"}
"""Root section of each command that makes runs, by the command's word; `train` has none."""
FINE_TUNING_SECTIONS = ("prefer", "sft")
"""Root sections of fine-tuning commands."""


@section("trainer")
class TrainerConfig:
    seed: int = 0
    """Seed of everything random: order of the prompts and every sampled token."""
    num_epochs: PositiveInt = 1
    """Visits of each prompt."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps, if the epochs are not over before."""
    critic_warmup: Annotated[NonNegativeInt, "0 is none"] = 0
    """Steps at the start in which only the critic is trained; 0: the actor is trained from the first step."""
    skip_rollout: str = ""
    """Folder of a run whose samples are trained on in place of new ones, with their tokens, log-probs and rewards: to
    debug the trainer, and to compare losses on equal data. Empty: samples are played."""
    trackers: tuple[str, ...] = ("console", "jsonl", "tensorboard")
    """Trackers, which take metrics: console, jsonl (which the commands of strop read), tensorboard, wandb, mlflow,
    swanlab, trackio, clearml, comet; or one of your own (algorithm.extensions) or of an installed package
    (docs/packages.md)."""
    project_name: str = "strop"
    """Project or experiment that the trackers of other people keep the run in. strop: the one that the tracker's own
    variable of the environment names, such as WANDB_PROJECT, where it is set."""
    experiment_name: str = ""
    """The run's name there; empty: that of its folder."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Steps to profile: each writes a timeline of all roles and ranks, and the trace of torch's profiler of every
    process, to the folder profile/ of the run (docs/profile.md). They are slower and change no result."""
    profile_memory: bool = False
    """In these steps, also write the history of CUDA's allocations in every process, for pytorch.org/memory_viz."""
    preflight: bool = True
    """Play a few dozen samples before the first step, show ten of them scored, and do not start a run that could not
    learn (`strop train --force` does). It changes nothing of the run."""
    rehearse_longest_batch: bool | Literal["auto"] = "auto"
    """Before the first step, run forward and backward passes of every trained model over random rows as long as they
    may be, in micro-batches as large as they may be, and print time and peak memory: what does not fit is found in
    seconds. They leave nothing behind. auto: on an accelerator."""
    max_hours: PositiveFloat | None = None
    """End after this much training time, all continuations together, with a last validation and checkpoint."""
    target_pass_rate: PositiveShare | None = None
    """End at the first validation that reaches this pass rate; it needs a reward that says which answers pass."""
    patience: PositiveInt | None = None
    """End when so many validations in a row were no better than the best one before them, by the pass rate or, where
    there is none, the mean reward."""

    def __post_init__(self) -> None:
        if self.profile_memory and not self.profile_steps:
            raise ValueError(
                "trainer.profile_memory is true, but trainer.profile_steps names no step to profile; set "
                "trainer.profile_steps=[3], or leave profile_memory out"
            )


@section("eval")
class EvalConfig:
    every: Annotated[NonNegativeInt, "0 is at the start and the end only"] = 20
    """Steps between validations during training; 0: only at the start and the end."""
    before_train: bool = True
    """Validate before the first step, which also tries the whole path before time is spent."""
    samples_per_prompt: PositiveInt = 1
    """Answers per prompt."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the most likely token at each place."""
    top_p: PositiveShare = 1.0
    """Sample from the smallest set of tokens with this probability; 1 is off."""
    top_k: Annotated[NonNegativeInt, "0 is off"] = 0
    """Sample from this many most likely tokens; 0 is off."""

    def __post_init__(self) -> None:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"eval.samples_per_prompt is {self.samples_per_prompt} at eval.temperature=0, which gives the same "
                f"answer each time; set eval.temperature above 0, or use one sample"
            )


MAX_THREADS = 4096
"""OpenMP ends a process that asks for threads without bound."""


_SET_BY_STROP = {
    **dict.fromkeys(OF_EACH_PROCESS, "it is another one in each process, and strop sets it"),
    **dict.fromkeys(
        VISIBILITY_VARIABLES,
        "each process gets a device of its own; to use some devices alone, export it before the command",
    ),
    **dict.fromkeys(
        ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_HOST_IP", "VLLM_TARGET_DEVICE", "VLLM_ENABLE_V1_MULTIPROCESSING",
         "VLLM_CPU_OMP_THREADS_BIND"),
        "training with vLLM depends on the value that strop gives it",
    ),
    "OMP_NUM_THREADS": "set resources.num_threads",
    "PYTHONPATH": "export it before the command: every process imports from there too",
}  # fmt: skip
"""Variables that resources.env may not name, and why."""


def check_env(env: Mapping[str, object]) -> None:
    """Refuse what is no variable, what strop sets itself, and secrets.

    Raises:
        ValueError: the sentence names it.
    """
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ValueError(
                f"resources.env names {name!r}, which is no name of a variable of the environment"
            )
        if name in _SET_BY_STROP or name.startswith("STROP_"):
            reason = _SET_BY_STROP.get(name, "variables of strop itself are exported before the command")
            raise ValueError(f"resources.env names {name}: {reason}; leave it out")
        if is_secret(name, value):
            raise ValueError(
                f"resources.env.{name} holds a secret, which would be written to the run folder: export it before the "
                f"command, and set resources.env.{name}=null, which passes it on"
            )


@section("resources")
class ResourcesConfig:
    device: str = "auto"
    """auto, cpu, cuda, npu: auto takes an accelerator if there is one."""
    num_threads: Annotated[int, Ge(0), Le(MAX_THREADS), "0 lets the run choose"] = 0
    """Threads for tensor operations on a CPU, per process. 0: OMP_NUM_THREADS where that is set, else a short
    measurement at the start decides, which a run records and keeps; processes of their own (ray) share the cores of
    their node. Another number may change the last bits."""
    runtime: Literal["inline", "ray"] = "inline"
    """inline: everything in this process. ray: the roles in processes of their own."""
    ranks: PositiveInt = 1
    """Processes of the main pool, over all nodes; the model is sharded over them."""
    nodes: PositiveInt = 1
    """Machines that the main pool is spread over, evenly."""
    min_nodes: Annotated[NonNegativeInt, "0 is all of nodes"] = 0
    """Machines with which the run goes on where others are lost, with as many processes on each; it takes more again,
    up to `nodes`, at a checkpoint. 0: all of them."""
    apart: dict[str, PositiveInt] = field(default_factory=dict)
    """Roles with processes of their own, and how many: {rollout: 2, critic: 1}. All other roles share the
    processes of the main pool."""
    weight_store: str = ""
    """Folder, or URL of any kind that fsspec knows, through which weights go to rollout processes apart that no fast
    network joins with the actor, in small files that are removed once they are read. Empty: through shared memory on
    one machine, else over the network."""
    address: str = ""
    """Ray cluster to use, `auto` or host:port; empty: a private one on this machine."""
    cpus_per_rank: PositiveFloat = 1.0
    """CPU cores that one process occupies for Ray's accounting; a fraction lets more processes share a core."""
    env: dict[str, str | int | float | None] = field(default_factory=dict)
    """Variables of the environment of every process of a run: workers, engines, reward functions, agents. null passes
    on the value that the variable has where the run is started, which other machines of a Ray cluster do not have."""
    call_timeout_s: PositiveFloat = 3600.0
    """Limit of one call of a role's workers, and of writing a checkpoint, in seconds; above it the run ends and names
    who did not answer."""
    start_timeout_s: PositiveFloat = 300.0
    """Limit for starting processes and loading models, in seconds."""
    offload_idle: bool = False
    """Move a role's model and optimizer from the accelerator to host memory while other roles work."""

    def ranks_of(self, role: str) -> int:
        """Processes of a role."""
        return self.apart.get(role, self.ranks)

    def __post_init__(self) -> None:
        if self.ranks % self.nodes:
            raise ValueError(
                f"resources.ranks is {self.ranks}, which {self.nodes} nodes cannot share evenly; use a multiple of "
                f"resources.nodes"
            )
        check_env(self.env)
        check_device_name(self.device, "resources.device")
        for role in self.apart:
            if role not in APART_ROLES:
                raise ValueError(
                    f"resources.apart names {role!r}, which is no role that can be apart: {', '.join(APART_ROLES)}"
                )
        if self.weight_store and not (is_url(self.weight_store) or Path(self.weight_store).is_absolute()):
            raise ValueError(
                f"resources.weight_store is {self.weight_store!r}, which means another folder in each process: give "
                f"an absolute path or a URL"
            )
        if self.runtime == "inline" and (self.ranks > 1 or self.apart):
            setting = f"resources.ranks is {self.ranks}" if self.ranks > 1 else "resources.apart is set"
            raise ValueError(
                f"{setting}, but resources.runtime=inline is one process: set resources.runtime=ray"
            )
