"""The sections of the root configuration that belong to the loop itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from strop.data.config import SftDataConfig
from strop.engines.config import EngineConfig, OptimizerConfig

APART_ROLES = ("rollout", "critic", "reference", "teacher", "reward_model")
"""Roles that can have processes of their own; the actor is always in the main pool."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    seed: int = 0
    """Seed of everything random: order of the prompts and every sampled token."""
    num_epochs: int = 1
    """Visits of each prompt."""
    max_steps: int | None = None
    """Stop after this many steps, if the epochs are not over before."""
    critic_warmup: int = 0
    """Steps at the start in which only the critic is trained; 0: the actor is trained from the first step."""
    trackers: tuple[str, ...] = ("console", "jsonl", "tensorboard")
    """Where metrics go."""
    preflight: bool = True
    """Play a few dozen samples before the first step, show ten of them scored, and do not start a run that could not
    learn (`strop train --force` does). It changes nothing of the run."""

    def __post_init__(self) -> None:
        if self.num_epochs < 1:
            raise ValueError(f"trainer.num_epochs is {self.num_epochs}; use at least 1")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"trainer.max_steps is {self.max_steps}; use at least 1, or null for no limit")
        if self.critic_warmup < 0:
            raise ValueError(f"trainer.critic_warmup is {self.critic_warmup}; it counts steps, from 0")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: int = 20
    """Steps between validations during training; 0: only at the start and the end."""
    before_train: bool = True
    """Validate before the first step, which also tries the whole path before time is spent."""
    samples_per_prompt: int = 1
    """Answers per prompt."""
    temperature: float = 0.0
    """0 takes the most likely token at each place."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability; 1 is off."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 is off."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(
                f"eval.every is {self.every}; use 0 for validation at the start and the end only"
            )
        if self.samples_per_prompt < 1:
            raise ValueError(f"eval.samples_per_prompt is {self.samples_per_prompt}; use at least 1")
        if self.temperature < 0:
            raise ValueError(f"eval.temperature is {self.temperature}; use 0 for greedy decoding, or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"eval.top_p is {self.top_p}; use a probability in (0, 1], 1 for off")
        if self.top_k < 0:
            raise ValueError(f"eval.top_k is {self.top_k}; use 0 for off")
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"eval.samples_per_prompt is {self.samples_per_prompt} at eval.temperature=0, which gives the same "
                f"answer each time; set eval.temperature above 0, or use one sample"
            )


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    data: SftDataConfig = field(default_factory=SftDataConfig)
    """Conversations to imitate."""
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Optimizer."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How forward and backward passes are cut."""
    examples_per_update: int = 32
    """Conversations per optimizer step."""
    num_epochs: int = 1
    """Visits of each conversation."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, if the epochs are not over before."""

    def __post_init__(self) -> None:
        if self.examples_per_update < 1:
            raise ValueError(f"sft.examples_per_update is {self.examples_per_update}; use at least 1")
        if self.num_epochs < 1:
            raise ValueError(f"sft.num_epochs is {self.num_epochs}; use at least 1")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"sft.max_steps is {self.max_steps}; use at least 1, or null for no limit")


MAX_THREADS = 4096
"""OpenMP ends a process that asks for threads without bound."""


@dataclass(frozen=True, kw_only=True)
class ResourcesConfig:
    device: str = "auto"
    """auto, cpu, cuda, npu: auto takes an accelerator if there is one."""
    num_threads: int = 0
    """Threads for tensor operations on a CPU, per process. 0: OMP_NUM_THREADS where that is set, else a short
    measurement at the start decides, which a run records and keeps; processes of their own (ray) share the cores of
    their node. Another number may change the last bits."""
    runtime: Literal["inline", "ray"] = "inline"
    """inline: everything in this process. ray: the roles in processes of their own."""
    ranks: int = 1
    """Processes of the main pool, over all nodes; the model is sharded over them."""
    nodes: int = 1
    """Machines that the main pool is spread over, evenly."""
    apart: dict[str, int] = field(default_factory=dict)
    """Roles with processes of their own, and how many: {rollout: 2, critic: 1}. All other roles share the
    processes of the main pool."""
    address: str = ""
    """Ray cluster to use, `auto` or host:port; empty: a private one on this machine."""
    cpus_per_rank: float = 1.0
    """CPU cores that one process occupies for Ray's accounting; a fraction lets more processes share a core."""
    call_timeout_s: float = 3600.0
    """Limit of one call of a role's workers, in seconds; above it the run ends and names who did not answer."""
    start_timeout_s: float = 300.0
    """Limit for starting processes and loading models, in seconds."""
    offload_idle: bool = False
    """Move a role's model and optimizer from the accelerator to host memory while other roles work."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_threads <= MAX_THREADS:
            raise ValueError(
                f"resources.num_threads is {self.num_threads}; use 0 to have it chosen, or at most {MAX_THREADS}"
            )
        if self.runtime not in ("inline", "ray"):
            raise ValueError(f"resources.runtime is {self.runtime!r}; use inline or ray")
        for name, count in (("ranks", self.ranks), ("nodes", self.nodes)):
            if count < 1:
                raise ValueError(f"resources.{name} is {count}; use at least 1")
        if self.ranks % self.nodes:
            raise ValueError(
                f"resources.ranks is {self.ranks}, which {self.nodes} nodes cannot share evenly; use a multiple of "
                f"resources.nodes"
            )
        for role, count in self.apart.items():
            if role not in APART_ROLES:
                raise ValueError(
                    f"resources.apart names {role!r}, which is no role that can be apart: {', '.join(APART_ROLES)}"
                )
            given: object = count  # free dictionaries are taken as they are
            if not isinstance(given, int) or given < 1:
                raise ValueError(f"resources.apart.{role} is {count}; it counts processes, from 1")
        if self.runtime == "inline" and (self.ranks > 1 or self.apart):
            asked = f"resources.ranks is {self.ranks}" if self.ranks > 1 else "resources.apart is set"
            raise ValueError(
                f"{asked}, but resources.runtime=inline is one process: set resources.runtime=ray"
            )
        for key in ("cpus_per_rank", "call_timeout_s", "start_timeout_s"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"resources.{key} is {value}; use a number above 0")
