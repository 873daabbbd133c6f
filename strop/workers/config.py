"""Sections of the configuration of each role: actor, reference, teacher, critic, process reward model, reward model."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from strop.config.sections import section
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, MoEConfig, OptimizerConfig
from strop.utils.field_types import FiniteFloat, PositiveFloat, PositiveInt


@section("actor")
class ActorConfig:
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the policy."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Batching of the policy's forward and backward passes."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Losses of the routers of a model with experts."""
    samples_per_update: PositiveInt | Literal["all"] = "all"
    """Most samples of an optimizer step; a batch is cut evenly into as few steps as that allows. all: one step on the
    whole batch, exactly on-policy."""
    epochs: PositiveInt = 1
    """Passes over the batch of one step."""


@section("reference")
class ReferenceConfig:
    path: str = ""
    """Hugging Face folder of the frozen reference model; empty: the policy's own starting point, model.path, with the
    adapter of model.lora.path where it continues one."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Batching of its forward passes."""


@section("teacher")
class TeacherConfig:
    """The frozen model that algorithm.distillation learns from."""

    path: str = ""
    """Hugging Face folder of the model that is learned from, with the policy's vocabulary; empty: no teacher."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Compute precision, as that of the policy (model.dtype)."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Batching of its forward passes."""


@section("critic")
class CriticConfig:
    """The value model; loaded only when the advantage estimator needs values (gae)."""

    path: str = ""
    """Hugging Face folder to start from, with the policy's tokenizer: a causal language model, which gets a new
    head whose values are 0, or a sequence-classification model with one label. Empty: model.path."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Train adapters and the head instead of all weights; the critic's own, whatever the policy has."""
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Optimizer of the critic."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Batching of the critic's forward and backward passes."""
    samples_per_update: PositiveInt | Literal["all"] = "all"
    """Samples per optimizer step; all: one step on the whole batch."""
    epochs: PositiveInt = 1
    """Passes over the batch of one step."""


@section("prm")
class PrmConfig:
    """The process reward model that learns during the run; loaded only when the advantage estimator needs its rewards
    (prime)."""

    path: str = ""
    """Hugging Face folder of the causal language model that the process reward model starts from, with the policy's
    tokenizer; empty: model.path."""
    beta: PositiveFloat = 0.05
    """Reward of a token per nat of log-ratio between this model and the weights that it began with."""
    update: Literal["before", "after"] = "before"
    """before: the model learns from the outcomes of a step, then gives the rewards of that step, at the price of one
    more forward pass. after: it gives them first."""
    right_above: FiniteFloat = 0.5
    """An answer whose score is above this counts as right, any other as wrong."""
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6))
    """Optimizer of the process reward model."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Batching of its forward and backward passes."""
    samples_per_update: PositiveInt | Literal["all"] = "all"
    """Most samples of an optimizer step; all: one step on the whole batch."""

    @property
    def epochs(self) -> int:
        """Passes over the batch of one step."""
        return 1


@section("reward_model")
class RewardModelConfig:
    """A model that scores answers; loaded only when reward_model.path is set."""

    path: str = ""
    """Hugging Face folder of a sequence-classification model with one label and its tokenizer; empty: no reward
    model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Compute precision, as that of the policy (model.dtype)."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Batching of its forward passes."""
    chat_template: str = ""
    """File with the Jinja chat template that turns a conversation into the text it reads; empty: the template of
    its own tokenizer."""
    max_tokens: PositiveInt | None = None
    """Longest conversation it reads, in its own tokens; not set: as long as its positions and
    engine.max_tokens_per_device allow."""
    truncation: Literal["left", "right", "error"] = "left"
    """Treatment of a longer one: `left` drops its beginning, `right` its end, where the score is read; both
    are counted in reward_model/truncated. `error` ends the run."""

    @property
    def model(self) -> ModelConfig:
        """The model that is loaded."""
        return ModelConfig(path=self.path, dtype=self.dtype)

    def __post_init__(self) -> None:
        if not self.path and self.chat_template:
            raise ValueError(
                f"reward_model.chat_template is {self.chat_template!r}, but reward_model.path is empty: set it to "
                f"the folder of a reward model, or remove the template"
            )
