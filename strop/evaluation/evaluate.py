"""Standalone evaluation: the validation of a training run, on any model folder, without a run.

The same configuration, prompts and seed give the answers that a validation during training gives.

Concurrency: one asyncio loop; generation and scoring have the deadlines of rollout.timeout_s and
reward.timeout_s. With resources.runtime=ray each rank has a loop of its own, and the call of all has the deadline
resources.call_timeout_s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.agents.setup import AgentSetup
from strop.controller import Dispatch, Mesh, Worker, WorkerGroup, register, role
from strop.protocol import DataProto
from strop.protocol.trajectory import Prompt
from strop.rewards import RewardPool
from strop.trainer.callbacks import Reporter
from strop.trainer.checks.template_variables import check_variables
from strop.trainer.config import Config
from strop.trainer.environment import environment_of
from strop.trainer.remote_model import OnUsage
from strop.trainer.reward_trial import probe_scorers
from strop.trainer.setup import check_prompts_fit, checked_tokenizer, load_val_prompts
from strop.trainer.standalone import is_remote, model_backend, run_standalone
from strop.trainer.validation import Validation, summarize_validation
from strop.trainer.worker_groups import start_runtime
from strop.utils.device import device_name
from strop.workers.episodes import Episode
from strop.workers.reports import EpisodeReport, check_failed_episodes, episode_report


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of a model on a dataset."""

    total: Validation
    by_source: Mapping[str, Validation]
    """The same per data source, in the order in which they appear."""
    answers: tuple[Mapping[str, Any], ...]
    """Each answer with its prompt, score and facts of the scorer, in the order of the prompts."""
    seconds: float
    """Wall-clock time, loading included."""
    usage: Mapping[str, int]
    """Usage of a server (rollout.engine=openai): requests, retries, input_tokens, output_tokens."""

    def __repr__(self) -> str:
        sources = (
            {name: validation.describe() for name, validation in self.by_source.items()}
            if len(self.by_source) > 1
            else {}
        )
        parts = [self.total.describe(), *(f"{name}: {text}" for name, text in sources.items())]
        return f"Evaluation({'; '.join(parts)}; {self.seconds:.1f} s)"


Progress = Callable[[int, int], None]
"""Takes the number of answers that are done, and of all."""


def evaluate(
    config: Config, *, say: Reporter, on_progress: Progress = lambda done, total: None
) -> Evaluation:
    """Answer data.val_files with model.path and score the answers.

    Args:
        config: `eval` has the sampling options, `reward` the scorer.
        say: prints a line.
        on_progress: called as answers end.

    Raises:
        ValueError, FileNotFoundError: the sentence names the error of model, data or reward function.
        EpisodesFailed: too many answers failed before scoring.
    """
    start = time.perf_counter()
    if not config.data.val_files:
        raise ValueError(
            "data.val_files is empty; name the files to evaluate on, for example data.val_files=[val.parquet]"
        )
    on_ranks = config.resources.runtime != "inline"
    if on_ranks and config.rollout.engine != "native":
        raise ValueError(
            f"an evaluation on several ranks generates with the native engine, but rollout.engine is "
            f"{config.rollout.engine}: use rollout.engine=native, or resources.runtime=inline"
        )
    backend = model_backend(config)
    with environment_of(config.resources), backend.configured(config) as spoken:
        setup = _setup(spoken)
        limits = backend.convert_limits(spoken.data, spoken)
        prompts, left_out = load_val_prompts(limits, setup.tokenizer, setup)
        if any(prompt.media for prompt in prompts):
            from strop.trainer.checks.media import check_engine  # torch and Pillow: seconds

            check_engine(spoken.rollout, spoken.model)
        check_prompts_fit(spoken, spoken.data, prompts)
        say(
            f"{len(prompts)} prompts x {config.eval.samples_per_prompt} answers at temperature "
            f"{config.eval.temperature}{left_out}"
        )
        unread = check_variables("data", spoken.data.chat_template_kwargs, setup.tokenizer)
        if unread is not None and not is_remote(config):
            say(f"WARNING: {unread.text}: {unread.advice}")
        usage: dict[str, int] = {}
        if on_ranks:
            episodes = _play_on_ranks(config, prompts, say=say)
        else:
            playing = _play(spoken, setup, prompts, say=say, on_progress=on_progress, on_usage=usage.update)
            episodes = asyncio.run(playing)
    reports = [episode_report(episode) for episode in episodes]
    check_failed_episodes(reports)
    sources = dict.fromkeys(prompt.data_source for prompt in prompts)
    return Evaluation(
        total=summarize_validation(reports),
        by_source={
            source: summarize_validation([report for report in reports if report.data_source == source])
            for source in sources
        },
        answers=tuple(
            {**_answer(episode, report), **({} if is_remote(config) else _tokens(episode))}
            for episode, report in zip(episodes, reports, strict=True)
        ),
        seconds=time.perf_counter() - start,
        usage=usage,
    )


def _answer(episode: Episode, report: EpisodeReport) -> dict[str, Any]:
    """One answer under the names of the sample store; `strop score` reads them."""
    outcome = episode.outcome
    return {
        "id": episode.id,
        "data_source": episode.prompt.data_source,
        "prompt": list(episode.prompt_messages),
        "response": episode.text,
        "ground_truth": episode.prompt.ground_truth,
        "passed": report.passes,
        "score": report.score,
        "reward_parts": {} if outcome is None else dict(outcome.parts),
        "error": report.failure or ("" if outcome is None else outcome.error),
        "stop_reason": report.stop_reason,
        "num_tokens": report.num_response_tokens,
    }


def _tokens(episode: Episode) -> dict[str, Any]:
    """The tokens of an answer as they were sampled, of all training sequences; none where they stand for images."""
    sequences = [
        {
            "prompt_ids": list(sequence.prompt_ids),
            "response_ids": list(sequence.response_ids),
            "response_mask": list(sequence.sampled),
        }
        for sequence in (
            (*episode.earlier, episode.trajectory)
            if episode.trajectory is not None and not episode.prompt.media
            else ()
        )
    ]
    if not sequences:
        return {}
    earlier = {"earlier_sequences": sequences[:-1]} if len(sequences) > 1 else {}
    return {**sequences[-1], **earlier}


def _setup(config: Config) -> AgentSetup:
    return AgentSetup(
        config.agent,
        checked_tokenizer(config),
        template_options=config.data.chat_template_kwargs,
        max_prompt_tokens=config.data.max_prompt_tokens,
    )


async def _play(
    config: Config,
    setup: AgentSetup,
    prompts: Sequence[Prompt],
    *,
    say: Reporter,
    on_progress: Progress,
    on_usage: OnUsage,
) -> list[Episode]:
    total = len(prompts) * config.eval.samples_per_prompt
    num_done = 0

    def count(_: Episode) -> None:
        nonlocal num_done
        num_done += 1
        on_progress(num_done, total)

    async with RewardPool(config.reward, tokenizer=config.model.tokenizer_folder) as pool:
        await _probe(pool, config, prompts, say)
        on_progress(0, total)
        return await run_standalone(
            config, setup, prompts, pool, section=config.eval, on_episode=count, on_usage=on_usage
        )


async def _probe(pool: RewardPool, config: Config, prompts: Sequence[Prompt], say: Reporter) -> None:
    size = config.eval.samples_per_prompt
    await probe_scorers(pool, prompts, say, group_size=size, validation_size=size)


def _play_on_ranks(config: Config, prompts: Sequence[Prompt], *, say: Reporter) -> list[Episode]:
    """The same answers, from processes of their own that each have a share of the prompts."""

    async def probe() -> None:
        async with RewardPool(config.reward, tokenizer=config.model.path) as pool:
            await _probe(pool, config, prompts, say)

    asyncio.run(probe())
    ranks = min(config.resources.ranks, len(prompts))
    resources = dataclasses.replace(
        config.resources,
        device=device_name(config.resources.device),
        ranks=ranks,
        nodes=math.gcd(ranks, config.resources.nodes),
        apart={},
        weight_store="",
    )
    config = dataclasses.replace(config, resources=resources, agent=config.agent.with_absolute_paths())
    say(f"{ranks} processes, each with the whole model and its share of the prompts")
    with start_runtime(config, log_dir=None) as runtime:
        spec = role(EvaluationWorker, config).on(Mesh(dp=ranks))
        workers: WorkerGroup[EvaluationWorker] = runtime.groups({"rollout": spec})["rollout"]
        episodes = workers.call.play(DataProto.from_dict({}, non_tensors={"prompt": list(prompts)}))
        return list(episodes.non_tensor_batch["episode"])


class EvaluationWorker(Worker):
    """Answers its share of the prompts with a whole model of its own; the ranks share nothing."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def play(self, prompts: DataProto) -> DataProto:
        """Every answer to these prompts, scored: column `episode` of Episode, in the order of prompts and samples.

        Args:
            prompts: column `prompt` of Prompt objects.
        """
        config = self._config

        async def play() -> list[Episode]:
            shard = list(prompts.non_tensor_batch["prompt"])
            async with RewardPool(
                config.reward, tokenizer=config.model.path, rank=self.rank, count=self.world_size
            ) as pool:
                return await run_standalone(config, _setup(config), shard, pool, section=config.eval)

        return DataProto.from_dict({}, non_tensors={"episode": asyncio.run(play())})
