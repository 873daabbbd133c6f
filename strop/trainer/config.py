"""The root configuration: one tree for every command, put together from the rooms' own parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from strop.algorithms.advantages import check_estimator
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.losses import get_policy_loss_fn
from strop.data.config import DataConfig, SftDataConfig
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.rewards.config import RewardConfig
from strop.rollout.config import RolloutConfig
from strop.run.config import RunConfig
from strop.workers.config import ActorConfig, ReferenceConfig


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    seed: int = 0
    """Seed of everything random: order of the prompts and every sampled token."""
    num_epochs: int = 1
    """Visits of each prompt."""
    max_steps: int | None = None
    """Stop after this many steps, if the epochs are not over before."""
    trackers: tuple[str, ...] = ("console", "jsonl", "tensorboard")
    """Where metrics go."""

    def __post_init__(self) -> None:
        if self.num_epochs < 1:
            raise ValueError(f"trainer.num_epochs is {self.num_epochs}; use at least 1")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"trainer.max_steps is {self.max_steps}; use at least 1, or null for no limit")


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

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(
                f"eval.every is {self.every}; use 0 for validation at the start and the end only"
            )
        if self.samples_per_prompt < 1:
            raise ValueError(f"eval.samples_per_prompt is {self.samples_per_prompt}; use at least 1")
        if self.temperature < 0:
            raise ValueError(f"eval.temperature is {self.temperature}; use 0 for greedy decoding, or above")
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


@dataclass(frozen=True, kw_only=True)
class ResourcesConfig:
    device: str = "auto"
    """auto, cpu, cuda, npu: auto takes an accelerator if there is one."""
    num_threads: int = 0
    """Threads for tensor operations on a CPU; 0: all cores. Another number may change the last bits."""

    def __post_init__(self) -> None:
        if self.num_threads < 0:
            raise ValueError(f"resources.num_threads is {self.num_threads}; use 0 for all cores")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model to start from."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    sft: SftConfig = field(default_factory=SftConfig)
    """Supervised fine-tuning: read by `strop sft` alone."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation during training."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Scoring."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """From rewards to a loss."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """The frozen model of a KL term; loaded only when there is one."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The loop."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Validation."""
    run: RunConfig = field(default_factory=RunConfig)
    """The run folder."""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    """Devices."""

    def __post_init__(self) -> None:
        check_estimator(
            self.algorithm.adv_estimator,
            samples_per_prompt=self.rollout.samples_per_prompt,
            norm_by_std=self.algorithm.norm_adv_by_std,
        )
        get_policy_loss_fn(self.algorithm.policy_loss)
        longest = self.data.max_prompt_tokens + self.data.max_response_tokens
        for name, engine in (("actor", self.actor.engine), ("reference", self.reference.engine)):
            if engine.max_tokens_per_device < longest:
                raise ValueError(
                    f"{name}.engine.max_tokens_per_device is {engine.max_tokens_per_device}, but one sample may have "
                    f"{longest} tokens (data.max_prompt_tokens {self.data.max_prompt_tokens} + "
                    f"data.max_response_tokens {self.data.max_response_tokens}): raise it to at least {longest}, or "
                    f"lower the limits"
                )
        if self.sft.engine.max_tokens_per_device < self.sft.data.max_tokens:
            raise ValueError(
                f"sft.engine.max_tokens_per_device is {self.sft.engine.max_tokens_per_device}, but one conversation "
                f"may have {self.sft.data.max_tokens} tokens (sft.data.max_tokens): raise the first to at least that, "
                f"or lower the second"
            )
        if self.reference.path and not self.algorithm.use_kl_loss:
            raise ValueError(
                f"reference.path is {self.reference.path!r}, but nothing uses a reference model: set "
                f"algorithm.use_kl_loss=true, or remove it"
            )

    @property
    def samples_per_step(self) -> int:
        """Samples of a full step."""
        return self.data.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        """Samples of one optimizer step."""
        wanted = self.actor.samples_per_update
        return self.samples_per_step if wanted == "all" else min(int(wanted), self.samples_per_step)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a full step."""
        return -(-self.samples_per_step // self.samples_per_update) * self.actor.epochs

    def arithmetic(self) -> str:
        """The batch sizes in one line: `32 prompts x 8 samples = 256 samples/step -> 1 optimizer step of 256`."""
        updates = self.updates_per_step
        return (
            f"{self.data.prompts_per_step} prompts x {self.rollout.samples_per_prompt} samples = "
            f"{self.samples_per_step} samples/step -> {updates} optimizer step{'s' if updates > 1 else ''} of "
            f"{self.samples_per_update}, at most {self.actor.engine.max_tokens_per_device} tokens per forward pass"
        )
