"""Configuration of the roles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from strop.engines.config import EngineConfig, LoraConfig, OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the policy."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How the policy's forward and backward passes are cut."""
    samples_per_update: int | Literal["all"] = "all"
    """Most samples of an optimizer step; a batch is cut evenly into as few steps as that allows. all: one step on the
    whole batch, exactly on-policy."""
    epochs: int = 1
    """Passes over the batch of one step."""

    def __post_init__(self) -> None:
        _check_updates("actor", self.samples_per_update, self.epochs)


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    path: str = ""
    """Hugging Face folder of the frozen reference model; empty: the policy's own starting point, model.path."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How its forward passes are cut."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    path: str = ""
    """Hugging Face folder of the model that is learned from, with the policy's vocabulary; empty: no teacher."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute precision, as that of the policy (model.dtype)."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How its forward passes are cut."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    path: str = ""
    """Hugging Face folder to start from, with the policy's tokenizer: a causal language model, which gets a new
    head whose values are 0, or a sequence-classification model with one label. Empty: model.path."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Train adapters and the head instead of all weights; the critic's own, whatever the policy has."""
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Optimizer of the critic."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How the critic's forward and backward passes are cut."""
    samples_per_update: int | Literal["all"] = "all"
    """Samples per optimizer step; all: one step on the whole batch."""
    epochs: int = 1
    """Passes over the batch of one step."""

    def __post_init__(self) -> None:
        _check_updates("critic", self.samples_per_update, self.epochs)


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    path: str = ""
    """Hugging Face folder of a sequence-classification model with one label and its tokenizer; empty: no reward
    model."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute precision, as that of the policy (model.dtype)."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How its forward passes are cut."""
    chat_template: str = ""
    """File with the Jinja chat template that turns a conversation into the text it reads; empty: the template of
    its own tokenizer."""
    max_tokens: int | None = None
    """Longest conversation it reads, in its own tokens; not set: as long as its positions and
    engine.max_tokens_per_device allow."""
    truncation: Literal["left", "right", "error"] = "left"
    """What becomes of a longer one: `left` drops its beginning, `right` its end, where the score is read; both
    are counted in reward_model/truncated. `error` ends the run."""

    def __post_init__(self) -> None:
        if self.truncation not in ("left", "right", "error"):
            raise ValueError(f"reward_model.truncation is {self.truncation!r}; use left, right or error")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"reward_model.max_tokens is {self.max_tokens}; use at least 1")
        if not self.path and self.chat_template:
            raise ValueError(
                f"reward_model.chat_template is {self.chat_template!r}, but reward_model.path is empty: set it to "
                f"the folder of a reward model, or remove the template"
            )


def _check_updates(role: str, samples_per_update: int | Literal["all"], epochs: int) -> None:
    if samples_per_update != "all" and int(samples_per_update) < 1:
        raise ValueError(f"{role}.samples_per_update is {samples_per_update}; use at least 1, or all")
    if epochs < 1:
        raise ValueError(f"{role}.epochs is {epochs}; use at least 1")
