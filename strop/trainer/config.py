"""The root configuration: one tree for every command, put together from the packages' own sections."""

from __future__ import annotations

import math
from dataclasses import field, replace
from itertools import pairwise
from typing import Protocol

from strop.agents.config import AgentConfig
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.registry import STEP_COLUMNS
from strop.algorithms.specs import ADV_DECLARATIONS, LOSS_DECLARATIONS, adv_estimator_declaration
from strop.config.sections import section, where_on
from strop.data.config import DataConfig
from strop.data.curriculum import is_sampler
from strop.data.preference_config import PreferConfig
from strop.data.sft.config import SftConfig
from strop.engines.config import EngineConfig, ModelConfig
from strop.rewards.config import RewardConfig
from strop.rollout.config import RolloutConfig
from strop.rollout.registry import is_known
from strop.run.config import RunConfig
from strop.trainer.checks.sections import check_together
from strop.trainer.sections import EvalConfig, ResourcesConfig, TrainerConfig
from strop.workers.config import (
    ActorConfig,
    CriticConfig,
    PrmConfig,
    ReferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)


def even_bounds(count: int, at_most: int) -> list[int]:
    """Bounds of the fewest consecutive parts of at most `at_most` items, of equal sizes up to one.

    21 items in parts of at most 10 are cut at [0, 7, 14, 21]; no item gives [0].
    """
    parts = -(-count // at_most)
    return [0, *(-(-count * part // parts) for part in range(1, parts + 1))]


class UpdateSettings(Protocol):
    """The section of a role that learns."""

    @property
    def samples_per_update(self) -> int | str:
        """Samples of one optimizer step, or `all`."""

    @property
    def epochs(self) -> int:
        """Passes over the batch of one step."""


@section("")
class Config:
    """Everything a run depends on.

    It is checked when it is made, but for one that names functions of `algorithm.extensions`: making it imports no file
    of the user's, so what such a function asks for is known, and `check` can be called, once they are imported
    (`strop.trainer.loading` does both).
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model to start from."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation during training."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Agents and tools, between a prompt and its final answer."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Scoring."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Algorithm, from rewards to a loss."""
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
    prefer: PreferConfig = field(default_factory=PreferConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    prm: PrmConfig = field(default_factory=PrmConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    sft: SftConfig = field(default_factory=SftConfig)

    def __post_init__(self) -> None:
        if not self.algorithm.extensions or self._has_known_names():
            self.check()

    def _has_known_names(self) -> bool:
        """Every function that is named is built in, or was registered in this process."""
        algorithm = self.algorithm
        return (
            algorithm.adv_estimator in ADV_DECLARATIONS
            and algorithm.policy_loss in LOSS_DECLARATIONS
            and is_sampler(self.data.sampler)
            and is_known(self.rollout.engine)
            and algorithm.has_known_names
            and algorithm.filter_groups.has_known_names
        )

    def check(self) -> None:
        """Refuse settings of which each may be right, but that do not go together.

        Raises:
            ValueError: the sentence says which, and what to do.
        """
        self._complete_algorithm()
        check_together(self)

    def _complete_algorithm(self) -> None:
        """Defaults of the algorithm that follow from other sections; here alone, so that config.yaml records them."""
        algorithm = self.algorithm
        if (
            algorithm.loss_agg_mode == "seq-mean-token-sum-norm" and algorithm.loss_scale_factor is None
        ):  # the token budget of a response, as in the paper
            scale = float(self.data.max_response_tokens)
            algorithm = replace(algorithm, loss_scale_factor=scale)
        is_older = self.rollout.max_staleness > 0 and where_on(algorithm.correction) is None
        if is_older and algorithm.old_log_probs is None and algorithm.clips_what_is_older:
            algorithm = replace(algorithm, old_log_probs="rollout")
        object.__setattr__(self, "algorithm", algorithm)

    def needs(self, column: str) -> bool:
        """The advantage estimator declares this column."""
        return column in adv_estimator_declaration(self.algorithm.adv_estimator).needs

    @property
    def num_epochs(self) -> int | None:
        """Visits of each prompt; None when trainer.max_steps alone ends the run, because visits may be without use."""
        return None if self.unknown_length_reason else self.trainer.num_epochs

    @property
    def unknown_length_reason(self) -> str:
        """Reason for which the number of steps per epoch is unknown; empty where it is known."""
        if where_on(self.algorithm.filter_groups) is not None:
            return "algorithm.filter_groups asks for prompts until enough groups can teach"
        if where_on(self.data.datagen) is not None:
            return "data.datagen adds rows"
        if self.data.streaming and self.data.filter_overlong_prompts:
            return "data.streaming passes over prompts that are too long at their visit"
        return ""

    @property
    def engines(self) -> dict[str, EngineConfig]:
        """The engine's settings of every role that can be sharded, used by this run or not."""
        return {
            "actor": self.actor.engine,
            "reference": self.reference.engine,
            "critic": self.critic.engine,
            "teacher": self.teacher.engine,
            "prm": self.prm.engine,
            "reward_model": self.reward_model.engine,
        }

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of this run. With an adapter, the policy without it is the reference."""
        is_used = {
            "actor": True,
            "rollout": True,
            "critic": self.needs("values"),
            "teacher": where_on(self.algorithm.distillation) is not None,
            "prm": self.needs("process_rewards"),
            "reward_model": bool(self.reward_model.path),
            "reference": self.uses_reference and self.model.lora.rank == 0,
        }
        return tuple(name for name, used in is_used.items() if used)

    @property
    def used_engines(self) -> dict[str, EngineConfig]:
        """Engines of the models that this run uses."""
        return {role: engine for role, engine in self.engines.items() if role in self.roles}

    @property
    def async_setting(self) -> str:
        """The setting by which samples are played over several calls; empty: each step plays its own, and waits for
        them."""
        rollout = self.rollout
        settings = {
            "rollout.max_staleness": rollout.max_staleness,
            "rollout.over_issue": rollout.over_issue,
        }
        return next((key for key, value in settings.items() if value), "")

    @property
    def compares_answers(self) -> bool:
        """The advantage estimator looks at the single answers of episodes."""
        return bool(adv_estimator_declaration(self.algorithm.adv_estimator).needs & STEP_COLUMNS)

    @property
    def chooses_samples(self) -> bool:
        """Some samples may not be trained on, or several times."""
        return self.algorithm.chooses_samples

    @property
    def penalizes_kl(self) -> bool:
        """A penalty on the distance to the reference is taken off the rewards."""
        return self.algorithm.use_kl_in_reward

    @property
    def uses_reference(self) -> bool:
        """Something compares the policy with a frozen reference."""
        return self.algorithm.use_kl_loss or self.penalizes_kl or self.needs("ref_log_prob")

    @property
    def num_surplus_prompts(self) -> int:
        """Prompts that a step begins beyond those that it trains (rollout.over_issue)."""
        return math.ceil(self.rollout.over_issue * self.data.prompts_per_step)

    @property
    def prompts_drawn_per_step(self) -> int:
        """Prompts that a step uses up: those that it trains, and those that it drops (rollout.slowest)."""
        return self.data.prompts_per_step + self.num_surplus_prompts * (self.rollout.slowest == "drop")

    @property
    def samples_per_step(self) -> int:
        """Samples of a full step."""
        return self.data.prompts_per_step * self.rollout.samples_per_prompt

    def samples_per_update(self, learner: UpdateSettings) -> int:
        """Samples of one optimizer step of a role that learns."""
        size = learner.samples_per_update
        return self.samples_per_step if size == "all" else min(int(size), self.samples_per_step)

    def _num_learned_from(self, learner: UpdateSettings) -> int:
        """Samples of a full step that a role learns from: all, or the best of each prompt (algorithm.keep.best)."""
        best = self.algorithm.keep.best
        if best is None or learner is self.prm:
            return self.samples_per_step
        return self.data.prompts_per_step * min(best, self.rollout.samples_per_prompt)

    def updates_per_step(self, learner: UpdateSettings) -> int:
        """Optimizer steps of a role that learns, in a full step."""
        return -(-self._num_learned_from(learner) // self.samples_per_update(learner)) * learner.epochs

    def updates_of_run(self, learner: UpdateSettings, num_steps: int) -> int:
        """Optimizer steps of a role in so many full steps; the policy has none while the critic warms up."""
        num_without = self.trainer.critic_warmup if learner is self.actor else 0
        return max(1, num_steps - num_without) * self.updates_per_step(learner)

    def arithmetic(self) -> str:
        """The batch sizes in one line: `32 prompts x 8 samples = 256 samples/step -> 1 optimizer step of 256`."""
        updates = self.updates_per_step(self.actor)
        num_learned = self._num_learned_from(self.actor)
        of_them = f", {num_learned} of them trained on" if num_learned < self.samples_per_step else ""
        bounds = even_bounds(num_learned, self.samples_per_update(self.actor))
        sizes = sorted({after - first for first, after in pairwise(bounds)})
        return (
            f"{self.data.prompts_per_step} prompts x {self.rollout.samples_per_prompt} samples = "
            f"{self.samples_per_step} samples/step{of_them} -> {updates} optimizer step{'s' if updates > 1 else ''} of "
            f"{' or '.join(map(str, sizes))}, at most {self.actor.engine.max_tokens_per_device} tokens per forward pass"
        )

    def placement(self) -> str:
        """Engine and placement of generation, in one line: `rollout: vllm, apart, in 2 processes of its own, ...`."""
        engine, count = self.rollout.engine, self.resources.apart.get("rollout", 0)
        if remote := self.rollout.remote:
            return f"rollout: {engine}, {remote.model} at {remote.base_url}, which is not trained"
        if count:
            noun = "processes" if count > 1 else "process"
            return f"rollout: {engine}, apart, in {count} {noun} of its own, which get the weights after each step"
        if engine == "native":
            return "rollout: native, time-shared with the actor, with the actor's own weights"
        return f"rollout: {engine}, time-shared with the actor, on its devices; it gets the weights after each step"
