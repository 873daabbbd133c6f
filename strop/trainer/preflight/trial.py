"""A few dozen samples through the real path of a run, before it starts: the first samples of its own first step.

Nothing that a run is made of is touched: the sampler keeps its position, the ledger hears of nothing, no file of
samples is written, and random numbers belong to the samples, not to the order in which they are drawn.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strop.agents.setup import AgentSetup
from strop.algorithms.specs import adv_estimator_declaration
from strop.data.prompt_loader import next_prompts
from strop.protocol import columns
from strop.protocol.trajectory import Prompt
from strop.rewards import RewardPool
from strop.trainer.checks.models import check_models
from strop.trainer.collecting import training_rows
from strop.trainer.config import Config
from strop.trainer.preflight.facts import token_facts
from strop.trainer.preflight.rules import Agreement, Probe, can_teach, examine
from strop.trainer.preflight.tokens import TokenFacts, examine_tokens
from strop.trainer.role_columns import add_columns
from strop.trainer.setup import TrainingData, load_training_data, sampling_of
from strop.trainer.standalone import is_remote, model_backend, run_standalone
from strop.trainer.threads import set_threads
from strop.trainer.timing import Stages
from strop.trainer.worker_groups import WorkerGroups, make_worker_groups, rollout_settings, start_runtime
from strop.utils.chat_template.answers import answer_text
from strop.utils.device import device_name
from strop.utils.verdict import Check
from strop.workers.episodes import Episode
from strop.workers.reports import EpisodeReport, episode_report
from strop.workers.summary import answer_scores

ROUND_SAMPLES, ROUND_PROMPTS, MAX_ROUNDS = 48, 4, 4
"""Before a run, samples and least prompts of a round; a further round is played as long as none of them can teach."""
SHOWN = 10
"""Answers that are shown."""
_SHOWN_CHARACTERS = 120


class RunRefused(ValueError):
    """A run was not started, because it could not learn; the sentence says why and what to change."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Result of a preflight."""

    checks: list[Check]
    samples: list[dict[str, Any]]
    """Some of the answers: id, response, ground_truth, pred (what the scorer read, None where it does not say), score,
    reward, error."""
    num_prompts: int
    num_samples: int
    seconds: float
    """Wall-clock time, without the loading of models."""
    answered_by: str = ""
    """Somebody else's model, where that was tried; empty for the policy."""

    @property
    def obstacles(self) -> list[Check]:
        """The checks that stand in the way of any learning."""
        return [check for check in self.checks if check.level == "stop"]

    def lines(self) -> list[str]:
        """The answers, the checks and the verdict, for a person."""
        marks = {"ok": "ok  ", "warn": "warn", "stop": "FAIL"}
        lines = [answer_line(sample) for sample in self.samples]
        for check in self.checks:
            lines.append(f"{marks[check.level]} {check.name}: {check.text}")
            if check.advice:
                lines.append(f"     {check.advice}")
        verdict = (
            "ready to train" if self.answered_by == "" else f"data and rewards work with {self.answered_by}"
        )
        if self.obstacles:
            verdict = "this run would not learn"
        return [*lines, f"{verdict}; {self.num_samples} samples in {self.seconds:.1f} s"]

    def refusal(self) -> str:
        """Reason for which a run does not start, in one sentence."""
        reasons = "; ".join(f"{check.name}: {check.text} - {check.advice}" for check in self.obstacles)
        return (
            f"this run would not learn, so it was not started. {reasons}. To start it all the same: --force "
            f"(force=True in Python), or trainer.preflight=false"
        )


def run_preflight(config: Config, *, num_prompts: int) -> Preflight:
    """Load what a run needs, play its first prompts and look at what would be trained. Nothing is written or trained.

    Args:
        config: of the run.
        num_prompts: how many prompts to play; each has rollout.samples_per_prompt samples.

    Raises:
        ValueError, FileNotFoundError: the sentence says what cannot be used.
    """
    if is_remote(config):
        return _remote_preflight(config, num_prompts=num_prompts)
    set_threads(config.resources, config.model)
    data = load_training_data(config, reads_media=True)
    check_models(config)
    with start_runtime(config, log_dir=None) as runtime:
        roles = make_worker_groups(config, runtime, rollout_settings(config), num_steps=data.num_steps)
        trial = run_trial(config, data, roles, prompts_per_round=num_prompts, max_rounds=1)
    return _with_data(trial, data)


def _with_data(trial: Preflight, data: TrainingData) -> Preflight:
    """The same with what is to be said of the rows, which a run says by itself."""
    return replace(trial, checks=[*data.warnings, *trial.checks])


def _remote_preflight(config: Config, *, num_prompts: int) -> Preflight:
    """The first prompts of a run, answered by somebody else's model: do data, agents and rewards work?"""
    remote, backend = config.rollout.remote, model_backend(config)
    with backend.configured(config) as spoken:
        data = load_training_data(spoken, data=backend.convert_limits(spoken.data, spoken))
        start = time.perf_counter()
        prompts = first_prompts(data, num_prompts)
        options = spoken.data.chat_template_kwargs
        setup = AgentSetup(spoken.agent, data.tokenizer, template_options=options)

        async def play() -> list[Episode]:
            async with RewardPool(spoken.reward, tokenizer=spoken.model.path) as pool:
                return await run_standalone(spoken, setup, prompts, pool, section=spoken.rollout)

        episodes = asyncio.run(play())
    reports = [episode_report(episode) for episode in episodes]
    rewards = {report.id: (report.score,) for report in reports if report.score is not None}
    probe = Probe(
        tokens=None,
        reports=reports,
        rewards=rewards,
        max_response_tokens=config.data.max_response_tokens,
        max_failed_share=config.reward.max_failed_share,
        is_group_relative=adv_estimator_declaration(config.algorithm.adv_estimator).is_group_relative,
        optim=config.actor.optim,
        has_adapter=config.model.lora.enabled,
        agreement=None,
    )
    stride = max(1, len(episodes) // SHOWN)
    shown = list(zip(episodes, reports, strict=True))[::stride][:SHOWN]
    trial = Preflight(
        checks=examine(probe),
        samples=[
            _shown_sample(report, episode.prompt.ground_truth, episode.text, report.score)
            for episode, report in shown
        ],
        num_prompts=len(prompts),
        num_samples=len(reports),
        seconds=time.perf_counter() - start,
        answered_by=remote.model if remote else "",
    )
    return _with_data(trial, data)


def run_trial(
    config: Config,
    data: TrainingData,
    roles: WorkerGroups,
    *,
    prompts_per_round: int | None = None,
    max_rounds: int = MAX_ROUNDS,
    on_reports: Callable[[Sequence[EpisodeReport]], None] = lambda reports: None,
) -> Preflight:
    """Play the first prompts of a run with the roles that it has.

    Args:
        config: of the run.
        data: its prompts; the sampler stays where it is.
        roles: with the weights that the run starts from.
        prompts_per_round: prompts to play; not given: enough for about 48 samples.
        max_rounds: further rounds with other prompts are played, up to this many, until a sample can teach.
        on_reports: called with the reports of all samples.

    Raises:
        RunRefused: there is no prompt to play.
    """
    start = time.perf_counter()
    per_round = prompts_per_round or max(
        ROUND_PROMPTS, math.ceil(ROUND_SAMPLES / config.rollout.samples_per_prompt)
    )
    prompts = first_prompts(data, per_round * max_rounds)
    if not prompts:
        raise RunRefused(
            f"none of the first {per_round * max_rounds} prompts can be played: they are longer than "
            f"data.max_prompt_tokens={config.data.max_prompt_tokens}; raise it"
        )
    facts = token_facts(config, data.tokenizer, prompts)
    trial = _PreflightTrial(config, data, roles, facts)
    checks = examine_tokens(facts)
    if all(check.level != "stop" for check in checks):
        for begin in range(0, len(prompts), per_round):
            trial.play(prompts[begin : begin + per_round])
            if can_teach(trial.probe()):
                break
        checks = examine(trial.probe())
    on_reports(trial.reports)
    return Preflight(
        checks=checks,
        samples=trial.shown(),
        num_prompts=len(trial.prompts),
        num_samples=len(trial.reports),
        seconds=time.perf_counter() - start,
    )


def first_prompts(data: TrainingData, count: int) -> list[Prompt]:
    """Prompts of the next visits, at most one visit per row; the sampler of the run keeps its position."""
    ahead = copy.deepcopy(data.sampler)
    return next_prompts(data.train, ahead, min(count, len(data.train.row_numbers))).prompts


class _PreflightTrial:
    """Samples of the preflight so far, as the algorithm would see them."""

    def __init__(self, config: Config, data: TrainingData, roles: WorkerGroups, facts: TokenFacts) -> None:
        self._config, self._roles, self._facts = config, roles, facts
        self._tokenizer = data.tokenizer
        self._sampling = sampling_of(config, config.rollout, data.tokenizer)
        self.prompts: list[Prompt] = []
        self.reports: list[EpisodeReport] = []
        self._rewards: dict[str, tuple[float, ...]] = {}
        self._responses: dict[str, Tensor] = {}
        self._log_probs: list[tuple[Tensor, Tensor]] = []  # the trainer's and the engine's [tokens], by round

    def play(self, prompts: Sequence[Prompt]) -> None:
        """One round: sample, score, and compare log-probs, as a step does."""
        config, roles = self._config, self._roles
        episodes = roles.run_episodes(prompts, config.rollout.samples_per_prompt, self._sampling)
        self.prompts += prompts
        self.reports += episodes.reports
        batch = training_rows(config, roles, episodes, self._sampling)
        if not batch.reports:
            return
        names = {"old_log_probs"} | ({"rm_scores"} if "reward_model" in config.roles else set())
        batch = add_columns(batch, names, config, roles, Stages(roles))
        self._take(batch.reports, batch.columns_for("preflight").get().tensors())

    def _take(self, reports: Sequence[EpisodeReport], tensors: Mapping[str, Tensor]) -> None:
        """Rewards, answers and log-probs of one round."""
        totals = answer_scores(tensors)
        parts = tensors["reward_parts"].tolist() if "reward_parts" in tensors else [[] for _ in reports]
        responses = columns.rows(tensors["responses"])
        for report, total, part, response in zip(reports, totals.tolist(), parts, responses, strict=True):
            if report.is_last_row:  # of an episode's training sequences the one that has the episode's name
                self._rewards[report.id] = (total, *part)
                self._responses[report.id] = response
        sampled = columns.flat(tensors["response_mask"]).bool()
        both = (columns.flat(tensors[name])[sampled] for name in ("old_log_probs", "rollout_log_probs"))
        self._log_probs.append((next(both), next(both)))

    def probe(self) -> Probe:
        """All rounds together."""
        config = self._config
        return Probe(
            tokens=self._facts,
            reports=self.reports,
            rewards=self._rewards,
            max_response_tokens=config.data.max_response_tokens,
            max_failed_share=config.reward.max_failed_share,
            is_group_relative=adv_estimator_declaration(config.algorithm.adv_estimator).is_group_relative,
            optim=config.actor.optim,
            has_adapter=config.model.lora.enabled,
            has_teacher="teacher" in config.roles,
            agreement=self._agreement(),
        )

    def _agreement(self) -> Agreement | None:
        if not sum(ours.numel() for ours, _ in self._log_probs):
            return None
        ours, theirs = (torch.cat(parts).double() for parts in zip(*self._log_probs, strict=True))
        difference = (ours - theirs).abs()
        return Agreement(
            num_tokens=ours.numel(),
            max_log_prob=float(difference.max()),
            mean_log_prob=float(difference.mean()),
            mean_prob=float((ours.exp() - theirs.exp()).abs().mean()),
            is_float32=_is_float32(self._config),
        )

    def shown(self) -> list[dict[str, Any]]:
        """Ten samples at even distances."""
        truths = {prompt.uid: prompt.ground_truth for prompt in self.prompts}
        stride = max(1, len(self.reports) // SHOWN)
        return [self._sample(report, truths[report.uid]) for report in self.reports[::stride][:SHOWN]]

    def _sample(self, report: EpisodeReport, ground_truth: object) -> dict[str, Any]:
        response = self._responses.get(report.id)
        text = None if response is None else answer_text(self._tokenizer, response.tolist())
        return _shown_sample(report, ground_truth, text, self._rewards.get(report.id, (None,))[0])


def _shown_sample(
    report: EpisodeReport, ground_truth: object, response: str | None, reward: float | None
) -> dict[str, Any]:
    outcome = report.outcome
    return {
        "id": report.id,
        "response": response,
        "ground_truth": ground_truth,
        "pred": None if outcome is None else outcome.parts.get("pred"),
        "score": report.score,
        "reward": reward,
        "error": report.failure or ("" if outcome is None else outcome.error),
    }


def _is_float32(config: Config) -> bool:
    """Policy and engine compute in float32, or better."""
    is_cpu = device_name(config.resources.device) == "cpu"
    return config.model.dtype in ("float32", "float64") or (config.model.dtype == "auto" and is_cpu)


def answer_line(sample: Mapping[str, Any]) -> str:
    """`e0-000012/3  score 1  'the answer is 7', read as '7', right is '7'`."""
    reward, score = sample["reward"], sample["score"] or 0.0
    line = f"{sample['id']}  " + ("no score" if sample["score"] is None else f"score {score:g}")
    if reward is not None and not math.isclose(reward, score, abs_tol=1e-6):  # the reward is a float32
        line += f", reward {sample['reward']:.3g}"
    line += f"  {_shortened(sample['response'])}" if sample["response"] is not None else "  not kept"
    if sample["pred"] is not None:
        line += f", read as {_shortened(sample['pred'])}"
    if sample["ground_truth"] is not None:  # rows of TRL's form name none
        line += f", right is {_shortened(sample['ground_truth'])}"
    return f"{line}  {sample['error']}".rstrip()


def _shortened(value: object) -> str:
    """Beginning and end: answers stand at the end."""
    text = repr(value)
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]}…{text[-half:]}"
