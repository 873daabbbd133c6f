"""A model that scores answers: a sequence-classification model with its own tokenizer and chat template.

What it reads is always the conversation as text: the messages of the prompt and the answer as the assistant's, or
behind the words of the assistant's that it continues, through its own template and tokenizer. The policy's token ids
are not used, even where both tokenizers are equal: a policy may sample ids that encoding the same text would not give,
the template may close a turn that the policy left open at its length limit, and one text then has one score, whoever
wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from strop.controller import Dispatch, register
from strop.data.chat import Chat, encode, render
from strop.engines.causal_lm import CausalLM
from strop.engines.config import ModelConfig
from strop.engines.kinds import frozen_engine
from strop.engines.packing import make_rows
from strop.engines.parallel.ranks import Parallel
from strop.engines.pretrained_config import load_model_config
from strop.engines.token_budget import within_memory
from strop.engines.tokenizer import load_tokenizer
from strop.engines.value_models import (
    architecture,
    check_value_model,
    is_classifier,
    load_value_model,
    padding_token,
    without_padding,
)
from strop.protocol import DataProto
from strop.protocol.trajectory import with_answer
from strop.utils.sanitize.control_tokens import ControlText
from strop.workers.config import RewardModelConfig
from strop.workers.models import ModelWorker

_AFTER_THE_END = torch.zeros(1, dtype=torch.int64)
"""The engine gives the number before each response token; before this one stands the whole conversation."""


class RewardModelWorker(ModelWorker):
    """Holds the reward model."""

    def __init__(self, reward_model: RewardModelConfig, *, device: str) -> None:
        """Load model and tokenizer.

        Raises:
            ValueError: the folder is no classifier with one label, or has no chat template and none was given.
        """
        super().__init__()
        self._config = reward_model
        model = reward_model.model
        self._tokenizer = load_tokenizer(model)
        self._use_template()
        self._control = ControlText(self._tokenizer)
        self._padding = padding_token(model)
        parallel = self.join(reward_model.engine, device=device)
        loaded = load_reward_model(model, parallel=parallel, holds_half=reward_model.engine.kind == "torch")
        self.engine = frozen_engine(loaded, reward_model.engine, parallel)
        limits = (reward_model.max_tokens, reward_model.engine.max_tokens_per_device, loaded.max_positions)
        self._max_tokens = min(limit for limit in limits if limit is not None)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """The score of each answer.

        Args:
            data: columns raw_prompt (the chat messages of the prompt) and response_text (the answer as text).

        Returns:
            Columns rm_scores [B] float32, and rm_cut_tokens [B] int64: tokens that did not fit and were not
            read (the run counts such rows as reward_model/truncated).

        Raises:
            ValueError: a conversation that the template refuses, or one too long with truncation=error.
        """
        messages, answers = data.non_tensor_batch["raw_prompt"], data.non_tensor_batch["response_text"]
        texts = [
            self._encoded(*row, number) for number, row in enumerate(zip(messages, answers, strict=True))
        ]
        fitted = [self._fit(ids, number) for number, ids in enumerate(texts)]
        cut = torch.tensor(
            [len(text) - len(read) for text, read in zip(texts, fitted, strict=True)], dtype=torch.int64
        )
        prompts = [torch.tensor(ids, dtype=torch.int64) for ids in fitted]
        rows = make_rows(prompts, [_AFTER_THE_END] * len(prompts))
        scores = within_memory(
            self.engine,
            lambda: self.engine.map_tokens(rows, lambda tokens: {"rm_scores": tokens.values().float()}),
        )
        return DataProto.from_dict({**scores, "rm_cut_tokens": cut})

    def _use_template(self) -> None:
        """The configured chat template, or the tokenizer's."""
        file = self._config.chat_template
        if file:
            if not Path(file).is_file():
                raise ValueError(f"reward_model.chat_template is {file!r}, which is not a file")
            self._tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of the reward model {self._config.path!r} has no chat template, so prompt and answer "
                f"cannot be turned into the text that it was trained on: set reward_model.chat_template to a file "
                f"with its template"
            )

    def _encoded(self, messages: Sequence[Mapping[str, Any]], answer: str, row: int) -> Sequence[int]:
        """Token ids of one conversation, up to the one at which it is scored."""
        plain = self._control.as_plain_text(
            answer
        )  # it ends its turn where the template says so, and nowhere else
        chat = Chat(messages=with_answer(messages, plain), where=f"row {row} of a batch for the reward model")
        ids = encode(self._tokenizer, render(self._tokenizer, chat, add_generation_prompt=False))
        return without_padding(ids, self._padding)

    def _fit(self, ids: Sequence[int], row: int) -> Sequence[int]:
        """The tokens that are read."""
        limit, truncation = self._max_tokens, self._config.truncation
        if len(ids) <= limit:
            return ids
        if truncation == "error":
            raise ValueError(
                f"row {row} of a batch for the reward model has {len(ids)} of its tokens, but it reads at most "
                f"{limit}: raise reward_model.max_tokens and reward_model.engine.max_tokens_per_device, if its "
                f"positions allow that, or set reward_model.truncation=left"
            )
        return ids[-limit:] if truncation == "left" else ids[:limit]


def load_reward_model(
    config: ModelConfig,
    *,
    device: str = "auto",
    parallel: Parallel | None = None,
    holds_half: bool = False,
) -> CausalLM:
    """Load a sequence-classification model with one label: `score` gives the reward of a text at its last token.

    The score of a text is the value (`Tokens.values`) of a row that has the text as its prompt and any single
    token as its response.

    Raises:
        ValueError: as `load_model`, or the folder holds no sequence-classification model with one label.
    """
    check_reward_model(config)
    return load_value_model(config, device=device, parallel=parallel, holds_half=holds_half)


def check_reward_model(config: ModelConfig) -> None:
    """Refuse a folder that `load_reward_model` cannot take; no weight is read.

    Raises:
        ValueError: as `check_value_model`, or the folder holds no sequence-classification model with one label.
    """
    load_model_config(config)
    if not is_classifier(config.path):
        raise ValueError(
            f"reward model {config.path!r} is a {architecture(config.path)}; give the folder of a "
            f"sequence-classification model with one label (Qwen3ForSequenceClassification, num_labels=1)"
        )
    check_value_model(config)
