"""Preparation of a run before its first step, from cheap to expensive, so that bad input ends it in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.agents.setup import AgentSetup
from strop.data.cache import cache_folder, prune
from strop.data.config import DataConfig
from strop.data.dynamic_dataset.growth import Growth, adds_rows
from strop.data.loading import load_rows
from strop.data.mixture.epochs import rows_of_epochs
from strop.data.prompt_loader import TrainingPrompts
from strop.data.prompts import PromptDataset
from strop.data.sampler import PromptSampler
from strop.data.streaming import StreamedPrompts
from strop.data.visit_ids import val_uid
from strop.engines.config import ModelConfig
from strop.engines.model_facts import max_positions
from strop.engines.model_folder import named_ends
from strop.engines.pretrained_config import load_model_config
from strop.engines.tokenizer import load_tokenizer
from strop.protocol.trajectory import Prompt
from strop.rollout.config import RolloutConfig
from strop.rollout.types import Sampling
from strop.trainer.checks.held_out import check_prompts
from strop.trainer.checks.template_variables import check_variables
from strop.trainer.config import Config
from strop.trainer.sections import EvalConfig
from strop.utils.chat_template.answers import end_of_turn
from strop.utils.verdict import Check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Prompts of a run, and how many steps they make."""

    tokenizer: PreTrainedTokenizerBase
    train: TrainingPrompts
    val_prompts: list[Prompt]
    val_left_out: str
    """Text about rows of the validation files that are not among them (`PromptDataset.left_out`)."""
    sampler: PromptSampler
    max_steps: int | None
    """Limit of trainer.max_steps; None without one."""
    growth: Growth | None
    """Source of rows that are added during the run (strop.data.dynamic_dataset.growth.Growth), if any."""
    visits_per_step: float
    """Visits of each prompt per step; below 1, some prompts wait for a later step."""
    held_out: Check | None
    """A warning where validation prompts are trained on."""
    variables: Check | None
    """A warning where the chat template does not read what it is given."""

    @property
    def warnings(self) -> list[Check]:
        """Warnings before the first step."""
        return [check for check in (self.variables, self.held_out) if check is not None]

    @property
    def num_steps(self) -> int:
        """Steps of the whole run. Of a continued one it is known when the sampler is where it was."""
        limits = [limit for limit in (self.sampler.num_steps, self.max_steps) if limit is not None]
        return min(limits)  # the configuration sees to it that there is one

    def report(self) -> list[str]:
        """One line per split."""
        lines = [self.train.report()]
        if self.visits_per_step > 1:
            lines.append(
                f"a step takes more prompts than there are (data.prompts_per_step), so it visits each of the "
                f"{len(self.train.row_numbers)} about {self.visits_per_step:.3g} times"
            )
        if self.val_prompts:
            lines.append(f"val: {len(self.val_prompts)} prompts{self.val_left_out}")
        return lines + [f"WARNING: {check.text}: {check.advice}" for check in self.warnings]


def load_training_data(
    config: Config, *, data: DataConfig | None = None, reads_media: bool = False
) -> TrainingData:
    """Tokenizer, prompts and order of a run.

    Args:
        config: of the run.
        data: with other limits, in tokens of somebody else's model; not given: those of the run.
        reads_media: decode every video of the rows, which a run does when it needs it.

    Raises:
        ValueError, FileNotFoundError: the sentence says what is wrong with model folder, files or columns, or which
            settings do not go with images.
    """
    data = data or config.data
    tokenizer = checked_tokenizer(config)
    if not data.train_files:
        raise ValueError("data.train_files is empty; name at least one .parquet or .jsonl file")
    setup = AgentSetup(config.agent, tokenizer, template_options=data.chat_template_kwargs)
    train, growth = _training_prompts(config, data, tokenizer, setup)
    if isinstance(train, PromptDataset) and not train.has_media:
        check_positions(config, data, train.longest)
    chosen, num_epochs, num_never = None, config.num_epochs, 0
    if isinstance(train, PromptDataset):
        chosen, num_epochs, num_never = rows_of_epochs(train, data, num_epochs, config.trainer.seed)
    sampler = PromptSampler(
        train.row_numbers,
        config.prompts_drawn_per_step,
        config.trainer.seed,
        data.sampler,
        num_epochs=num_epochs,
        chosen=chosen,
        num_never=num_never,
        reorder_every=data.reorder_every,
        data=data,
        video_digest=train.video_digest if isinstance(train, PromptDataset) else "",
    )
    if reads_media and isinstance(train, PromptDataset):
        train.read_media()
    val_prompts, val_left_out = (
        load_val_prompts(data, tokenizer, setup, reads_media=reads_media) if data.val_files else ([], "")
    )
    check_prompts_fit(config, data, val_prompts)
    if train.has_media or any(prompt.media for prompt in val_prompts):
        from strop.trainer.checks.media import check_run  # torch and Pillow: seconds

        check_run(config)
    prune(cache_folder(data.cache_dir), data.cache_max_bytes)
    return TrainingData(
        tokenizer=tokenizer,
        train=train,
        val_prompts=val_prompts,
        val_left_out=val_left_out,
        sampler=sampler,
        max_steps=config.trainer.max_steps,
        growth=growth,
        visits_per_step=min(
            config.prompts_drawn_per_step / max(len(train.row_numbers), 1),
            math.inf if num_epochs is None else num_epochs,
        ),
        held_out=check_prompts(data, train, val_prompts) if val_prompts else None,
        variables=check_variables("data", data.chat_template_kwargs, tokenizer),
    )


def check_prompts_fit(config: Config, data: DataConfig, prompts: Sequence[Prompt]) -> None:
    """As `check_positions`, of prompts without images, whose number of tokens is known."""
    lengths = [len(prompt.token_ids) for prompt in prompts if not prompt.media]
    if lengths:
        check_positions(config, data, max(lengths))


def check_positions(config: Config, data: DataConfig, longest: int) -> None:
    """Refuse prompts and answers that together are longer than the model is made for, before anything is played."""
    limit = None if config.rollout.remote else max_positions(load_model_config(config.model))
    if limit is None or longest + data.max_response_tokens - 1 <= limit:
        return
    room = limit - longest + 1
    advice = f"set data.max_response_tokens={room}" if room > 0 else "use shorter prompts"
    raise ValueError(
        f"the longest prompt has {longest} tokens and data.max_response_tokens is {data.max_response_tokens}, but the "
        f"model in {config.model.path} is made for {limit} positions: {advice}, or lower data.max_prompt_tokens"
    )


def _training_prompts(
    config: Config, data: DataConfig, tokenizer: PreTrainedTokenizerBase, setup: AgentSetup
) -> tuple[TrainingPrompts, Growth | None]:
    """The training prompts, and what adds rows to them while the run goes on."""
    rows = load_rows(data, "train", tokenizer, seed=config.trainer.seed)
    if data.streaming:
        return StreamedPrompts(rows, tokenizer, data, prepare=setup.row_with_agent_and_tools), None
    train = PromptDataset(setup.with_agent_and_tools(rows, "train"), tokenizer, data, "train")
    if not adds_rows(data, rows):
        return train, None
    prepare, max_steps = lambda new: setup.with_agent_and_tools(new, "train"), config.trainer.max_steps
    growth = Growth(data, rows, train, tokenizer, prepare, max_steps=max_steps)
    return growth.prompts, growth


def load_val_prompts(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, setup: AgentSetup, *, reads_media: bool = False
) -> tuple[list[Prompt], str]:
    """The validation prompts, in the order of the files, and what of these is not among them
    (`PromptDataset.left_out`); `setup` knows what their agents and tools show."""
    rows = load_rows(data, "val", tokenizer)
    dataset = PromptDataset(setup.with_agent_and_tools(rows, "val"), tokenizer, data, "val")
    if reads_media:
        dataset.read_media()
    return [dataset.prompt(row, val_uid(row)) for row in dataset.row_numbers], dataset.left_out()


def checked_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of the run's model, once the tokens that end a response are known to be fine.

    Raises:
        ValueError: as of `load_tokenizer`, or as of `stop_token_ids`.
    """
    model, extra = config.model, config.rollout.stop_token_ids
    if extra and not config.rollout.remote:
        size = int(load_model_config(model).get_text_config().vocab_size)
        _check_stop_tokens(extra, size, f"the model in {model.path!r}")
    tokenizer = load_tokenizer(model)
    if not config.rollout.remote:
        stop_token_ids(model, tokenizer, extra)
    return tokenizer


def _check_stop_tokens(extra: Sequence[int], size: int, whose: str) -> None:
    if strange := [token for token in extra if not 0 <= token < size]:
        raise ValueError(
            f"rollout.stop_token_ids has {strange[0]}, but {whose} has the ids 0 to {size - 1}: name one of them, or "
            f"remove it"
        )


def stop_token_ids(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, extra: Sequence[int] = ()
) -> tuple[int, ...]:
    """Tokens that end a response: those of the model folder's generation settings, the tokenizer's, the one with which
    the chat template ends an answer, and `extra`.

    Raises:
        ValueError: there is none, so every response would run into its length limit; or one of `extra` is no token.
    """
    _check_stop_tokens(extra, len(tokenizer), f"the tokenizer of {model.path!r}")
    token_ids = {*(int(token) for token in extra), *named_ends(model, tokenizer)}
    if (end := end_of_turn(tokenizer)) is not None:
        token_ids.add(end)
    if not token_ids:
        raise ValueError(
            f"neither the tokenizer nor the generation settings of {model.path!r} name an end-of-sequence token; set "
            f"rollout.stop_token_ids"
        )
    return tuple(sorted(token_ids))


def sampling_of(
    config: Config, section: RolloutConfig | EvalConfig, tokenizer: PreTrainedTokenizerBase
) -> Sampling:
    """Options of every training sample, or of every validation answer; key and budget are filled in per episode.

    Args:
        config: of the run.
        section: its section rollout, or eval.
        tokenizer: of the model.
    """
    return Sampling(
        key=0,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        max_tokens=config.data.max_response_tokens,
        stop_token_ids=stop_token_ids(config.model, tokenizer, config.rollout.stop_token_ids),
    )
