"""What training on preferences reads, and how it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from strop.config.sections import section
from strop.data.config import Column, JsonMessages, check_template_kwargs
from strop.data.sft.config import files_named
from strop.engines.config import EngineConfig, OptimizerConfig
from strop.utils.field_types import NonNegativeFloat, PositiveFloat, PositiveInt, Share

Loss = Literal["sigmoid", "hinge", "ipo", "kto", "orpo", "simpo", "reward"]
WITHOUT_REFERENCE = ("orpo", "simpo", "reward")
"""Losses that do not ask what the starting model says."""


@section("prefer.data")
class PreferDataConfig:
    """Answers that were compared, or rated."""

    train_files: tuple[str, ...] = ()
    """Files with one comparison per row: .parquet, .jsonl, .json, folders of them or written by `datasets`
    (FOLDER@split), hub:owner/name[:config][@split][#revision] (or modelscope:), or URLs. Relative paths start
    at the current directory."""
    val_files: tuple[str, ...] = ()
    """The same for validation; empty means no validation."""
    prompt_key: Column = "prompt"
    """Column with what was asked, a string (one user message) or a list of messages. A row without it, whose answers
    are whole conversations, was asked what these have in common."""
    json_messages: JsonMessages = "refuse"
    """What becomes of a column that holds a list of messages as JSON text: it is refused, read as messages, or taken
    as a text."""
    chosen_key: Column = "chosen"
    """Column with the better answer, a string (one assistant message) or a list of messages."""
    rejected_key: Column = "rejected"
    """Column with the other one."""
    completion_key: Column = "completion"
    """With loss=kto: column with the answer."""
    margin_key: Column = "margin"
    """With loss=reward: column with how much better the better answer is; 0 for a row without it."""
    label_key: Column = "label"
    """With loss=kto: column that says whether it is good."""
    max_tokens: PositiveInt = 1024
    """Longest conversation, in tokens after the chat template; rows with a longer one are dropped and counted."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, for example {enable_thinking: false}."""

    def __post_init__(self) -> None:
        check_template_kwargs("prefer.data", self.chat_template_kwargs)


@section("prefer")
class PreferConfig:
    """Training on preferences: read by `strop prefer`, `strop dpo` and `strop reward-model` alone."""

    loss: Loss = "sigmoid"
    """sigmoid: DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7); hinge: SLiC's (Zhao et al. 2023,
    arXiv:2305.10425, as DPO's margin); ipo (Azar et al. 2023, arXiv:2310.12036, eq. 17, of mean log-probs); kto
    (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7 and 8), of single answers with a label; without the starting
    model, of mean log-probs: orpo (Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7) and simpo (Meng et al. 2024,
    arXiv:2405.14734, eq. 6); reward: a reward model instead of a policy (Ouyang et al. 2022, arXiv:2203.02155, eq. 1;
    margins of rows as Touvron et al. 2023, arXiv:2307.09288, eq. 2)."""
    beta: PositiveFloat = 0.1
    """How dearly the policy pays for leaving the model that it began with; with orpo the weight of the odds ratio
    (the paper's lambda), with simpo the scale of the margin, for which the paper has 2 to 10; not for loss=reward."""
    simpo_gamma: NonNegativeFloat = 0.5
    """By how much a better answer is to win, after beta: simpo alone."""
    label_smoothing: Share = 0.0
    """Share of comparisons that are thought to be the other way round, below 0.5: sigmoid alone."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of good answers: kto alone."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of bad answers: kto alone."""
    nll_coef: NonNegativeFloat = 0.0
    """Weight of the loss of imitating the better answers, per token (Pang et al. 2024, arXiv:2404.19733, eq. 1):
    sigmoid, hinge, ipo and simpo alone; orpo has it with weight 1."""
    center_coef: NonNegativeFloat = 0.0
    """Pulls the sum of both scores towards 0 (Eisenstein et al. 2023, arXiv:2312.09244, eq. 2): reward alone."""
    data: PreferDataConfig = field(default_factory=PreferDataConfig)
    """What was compared."""
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6))
    """Optimizer."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How forward and backward passes are cut."""
    examples_per_update: PositiveInt = 32
    """Comparisons (kto: answers) per optimizer step."""
    num_epochs: PositiveInt = 1
    """Visits of each row."""
    max_steps: PositiveInt | None = None
    """Stop after this many optimizer steps, if the epochs are not over before."""

    def __post_init__(self) -> None:
        if self.engine.max_tokens_per_device <= self.data.max_tokens:
            raise ValueError(
                f"prefer.engine.max_tokens_per_device is {self.engine.max_tokens_per_device}, but one conversation may "
                f"have {self.data.max_tokens} tokens (prefer.data.max_tokens), and one more is read behind it: raise "
                f"the first above that, or lower the second"
            )
        if self.label_smoothing >= 0.5:
            raise ValueError(
                f"prefer.label_smoothing is {self.label_smoothing}: more than half of the comparisons would be wrong; "
                f"use a number below 0.5"
            )
        for name, readers, default in (
            ("beta", ("sigmoid", "hinge", "ipo", "kto", "orpo", "simpo"), 0.1),
            ("simpo_gamma", ("simpo",), 0.5),
            ("label_smoothing", ("sigmoid",), 0.0),
            ("nll_coef", ("sigmoid", "hinge", "ipo", "simpo"), 0.0),
            ("desirable_weight", ("kto",), 1.0),
            ("undesirable_weight", ("kto",), 1.0),
            ("center_coef", ("reward",), 0.0),
        ):
            if self.loss not in readers and (value := getattr(self, name)) != default:
                raise ValueError(
                    f"prefer.{name} is {value}, which prefer.loss={self.loss} does not read: remove it, or use "
                    f"{' or '.join(readers)}"
                )

    def code_named(self) -> Iterator[tuple[str, str, str]]:
        """Files that are fetched; see strop.config.sections.code_below."""
        yield from files_named(self.data)


CHANGEABLE = ("prefer.engine.",)
"""Settings that a run may be continued with anew and stays the same."""
LENGTH, LEARNING = ("prefer.num_epochs", "prefer.max_steps"), ("prefer.optim.",)
"""Those that steer it."""
