"""Evaluation by itself: the validation of a training run, on any model folder, without a run.

The same configuration, prompts and seed give the answers that a validation during training gives.

Concurrency: one asyncio loop; generation and scoring have the deadlines of rollout.timeout_s and
reward.timeout_s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.agents.setup import AgentSetup
from strop.engines.model import load_model, load_tokenizer
from strop.rewards import RewardPool
from strop.rollout.native.engine import NativeEngine
from strop.trainer.config import Config
from strop.trainer.launch import Say
from strop.trainer.scorers import probe_scorers
from strop.trainer.setup import eval_sampling, load_val_prompts
from strop.trainer.threads import set_threads
from strop.trainer.validation import Validation, summarize_validation
from strop.trajectory import Prompt
from strop.workers.episodes import Episode
from strop.workers.player import make_player
from strop.workers.reports import EpisodeReport, check_failed_episodes, report_of


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a model can do on a dataset."""

    total: Validation
    by_source: Mapping[str, Validation]
    """The same per data source, in the order in which they appear."""
    answers: tuple[Mapping[str, Any], ...]
    """Each answer with its prompt, score and what the scorer said, in the order of the prompts."""
    seconds: float
    """Wall-clock time, loading included."""


Progress = Callable[[int, int], None]
"""Takes the number of answers that are done, and of all."""


def evaluate(config: Config, *, say: Say, on_progress: Progress = lambda done, total: None) -> Evaluation:
    """Answer data.val_files with model.path and score the answers.

    Args:
        config: `eval` says how to answer, `reward` how to score.
        say: takes lines for the person who watches.
        on_progress: called as answers end.

    Raises:
        ValueError, FileNotFoundError: the sentence says what is wrong with model, data or reward function.
        EpisodesFailed: too many answers failed before scoring.
    """
    start = time.perf_counter()
    set_threads(config.resources, config.model)
    if not config.data.val_files:
        raise ValueError(
            "data.val_files is empty; name the files to evaluate on, for example data.val_files=[val.parquet]"
        )
    tokenizer = load_tokenizer(config.model)
    setup = AgentSetup(config.agent, tokenizer, template_options=config.data.chat_template_kwargs)
    prompts = load_val_prompts(config.data, tokenizer, setup)
    say(
        f"{len(prompts)} prompts x {config.eval.samples_per_prompt} answers at temperature {config.eval.temperature}"
    )
    episodes = asyncio.run(_play(config, setup, prompts, say=say, on_progress=on_progress))
    reports = [report_of(episode) for episode in episodes]
    check_failed_episodes(reports)
    sources = dict.fromkeys(prompt.data_source for prompt in prompts)
    return Evaluation(
        total=summarize_validation(reports),
        by_source={
            source: summarize_validation([report for report in reports if report.data_source == source])
            for source in sources
        },
        answers=tuple(map(_answer, episodes, reports)),
        seconds=time.perf_counter() - start,
    )


def _answer(episode: Episode, report: EpisodeReport) -> dict[str, Any]:
    """One answer under the names of the sample store; `strop score` reads them."""
    outcome = episode.outcome
    return {
        "id": episode.id,
        "data_source": episode.prompt.data_source,
        "prompt": list(episode.prompt.messages),
        "response": episode.text,
        "ground_truth": episode.prompt.ground_truth,
        "passed": report.passes,
        "score": report.score,
        "reward_parts": {} if outcome is None else dict(outcome.parts),
        "error": report.failure or ("" if outcome is None else outcome.error),
        "stop_reason": report.stop_reason,
        "num_tokens": report.num_response_tokens,
    }


async def _play(
    config: Config, setup: AgentSetup, prompts: Sequence[Prompt], *, say: Say, on_progress: Progress
) -> list[Episode]:
    total = len(prompts) * config.eval.samples_per_prompt
    done = 0

    def count(_: Episode) -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    async with RewardPool(config.reward, tokenizer=config.model.tokenizer_folder) as pool:
        await probe_scorers(pool, prompts, say)
        model = load_model(config.model, device=config.resources.device)
        engine = NativeEngine(model, max_running=config.rollout.max_running)
        player = make_player(
            engine,
            model,
            setup.tokenizer,
            pool,
            setup=setup,
            timeout_s=config.rollout.timeout_s,
            seed=config.trainer.seed,
        )
        with contextlib.closing(player):
            on_progress(0, total)
            return await player.play(
                prompts,
                samples_per_prompt=config.eval.samples_per_prompt,
                sampling=eval_sampling(config, setup.tokenizer),
                on_episode=count,
            )
