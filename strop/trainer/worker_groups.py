"""Worker groups of a run from its configuration: roles, processes and meshes.

Placement is configuration: a role named in `resources.apart` has processes of its own, all others share
those of the main pool. Generation that shares processes with the actor uses the actor's own parameters;
apart, it has a copy that every update of the weights brings up to date.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from strop.config.sections import where_on
from strop.controller import (
    InlineRuntime,
    Runtime,
    WorkerGroup,
    WorkerLost,
    as_list,
)
from strop.controller.roles import RankDevices
from strop.protocol import DataProto
from strop.protocol.trajectory import Prompt
from strop.rollout.routing.router import Router
from strop.rollout.types import Sampling
from strop.trainer.api_costs import CostTracker
from strop.trainer.config import Config
from strop.trainer.fault_tolerance.rollout_workers import RolloutWorkers, are_replaced
from strop.trainer.policy_sync import MAX_RECOVERIES, WeightSync
from strop.trainer.remote_weight_sync import RemoteWeightSync
from strop.trainer.role_specs import role_specs
from strop.trainer.rollout_batch import RolloutBatch
from strop.trainer.sections import RoleName
from strop.utils.device import device_name
from strop.workers.actor import ActorWorker
from strop.workers.critic import CriticWorker
from strop.workers.models import ModelWorker, TrainedWorker
from strop.workers.prm import PrmWorker
from strop.workers.progress import RolloutProgress
from strop.workers.reference import ReferenceWorker
from strop.workers.reports import SampleDecision
from strop.workers.reward_model import RewardModelWorker
from strop.workers.rollout import RolloutSettings, RolloutWorker
from strop.workers.teacher import TeacherWorker

if TYPE_CHECKING:
    from strop.controller.ray.elastic import ElasticGroup

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WorkerGroups:
    """The worker groups of a run."""

    actor: WorkerGroup[ActorWorker]
    rollout: WorkerGroup[RolloutWorker]
    costs: CostTracker | None
    """API-cost counter of reward services, updated around each rollout call; None where none has a price."""
    progress: RolloutProgress
    """Display of the progress of generation."""
    sync: WeightSync
    """Weight sync from the actor to generation."""
    router: Router | None = None
    """Router over the engines of all rollout workers; None of one worker, or where each generates for itself."""
    workers: RolloutWorkers | None = None
    """Rollout workers apart that are replaced when they are lost; None where the run begins again instead."""
    reference: WorkerGroup[ReferenceWorker] | None = None
    """None without a KL term, and with LoRA, where the actor without its adapter is the reference."""
    critic: WorkerGroup[CriticWorker] | None = None
    """None without an estimator that needs values."""
    teacher: WorkerGroup[TeacherWorker] | None = None
    """None without distillation."""
    prm: WorkerGroup[PrmWorker] | None = None
    """None without an estimator that needs process rewards."""
    reward_model: WorkerGroup[RewardModelWorker] | None = None
    """None where reward functions alone score."""
    offloads_idle: bool = False
    """A role's model and optimizer leave the device when it is idle."""

    @property
    def groups(self) -> dict[RoleName, WorkerGroup[ModelWorker | RolloutWorker]]:
        """Worker groups of all roles, by name."""
        groups: dict[RoleName, WorkerGroup[ModelWorker | RolloutWorker] | None] = {
            "actor": self.actor,
            "rollout": self.rollout,
            "reference": self.reference,
            "critic": self.critic,
            "teacher": self.teacher,
            "prm": self.prm,
            "reward_model": self.reward_model,
        }
        return {name: group for name, group in groups.items() if group is not None}

    def trained(self) -> dict[RoleName, WorkerGroup[TrainedWorker]]:
        """Worker groups of the roles that learn, by name."""
        groups: dict[RoleName, WorkerGroup[TrainedWorker] | None] = {
            "actor": self.actor,
            "critic": self.critic,
            "prm": self.prm,
        }
        return {name: group for name, group in groups.items() if group is not None}

    def with_models(self) -> dict[RoleName, WorkerGroup[ModelWorker]]:
        """Worker groups of the roles with a model of their own, by name."""
        groups: dict[RoleName, WorkerGroup[ModelWorker] | None] = {
            **self.trained(),
            "reference": self.reference,
            "teacher": self.teacher,
            "reward_model": self.reward_model,
        }
        return {name: group for name, group in groups.items() if group is not None}

    def checksums(self) -> dict[str, str]:
        """Digest of the weights of each role that learns."""
        return {name: as_list(group.call.checksum())[0] for name, group in self.trained().items()}

    @contextlib.contextmanager
    def on_device(self, name: RoleName) -> Iterator[None]:
        """Context in which a role works; with resources.offload_idle it leaves its device afterwards. Generation gives
        the memory of its key-value cache back in any case.

        A role that is not there (a reference that is the actor) does nothing here.
        """
        if name == "rollout" and self.costs is not None:
            self.costs.before_rollout(self.rollout)
        yield
        if name == "rollout":
            self.rollout.call.sleep()
            if self.costs is not None:
                self.costs.after_rollout(self.rollout)
        if self.offloads_idle and (group := self.groups.get(name)) is not None:
            group.call.offload()

    @contextlib.contextmanager
    def generating(self, num_samples: int) -> Iterator[None]:
        """Context in which generation samples so many episodes."""
        with self.on_device("rollout"), self.progress.watch(num_samples):
            yield

    def run_episodes(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        sampling: Sampling,
        *,
        order_by: Callable[[Sequence[Prompt]], Sequence[Prompt]] | None = None,
    ) -> RolloutBatch:
        """Sample and score every episode of these prompts, in order; key and budget of `sampling` are filled in.

        Args:
            prompts, samples_per_prompt, sampling: prompts, samples of each, and options of every sample.
            order_by: gives the prompts in the order of their start.

        Raises:
            RewardError: the scorers cannot go on.
        """
        batch, pending = None, prompts if order_by is None else order_by(prompts)
        num_recoveries = 0
        with self.generating(len(prompts) * samples_per_prompt):
            while pending or batch is None:
                rows = DataProto.from_dict({}, non_tensors={"prompt": pending})
                columns = self.rollout.call.run_episodes(rows, samples_per_prompt, sampling)
                reports = (
                    columns.select([], ["report"]).get().non_tensor_batch["report"]
                )  # waits for the samples
                part = RolloutBatch(rows=columns.select([], ["episode"]), reports=tuple(reports))
                batch = part if batch is None else RolloutBatch.concat([batch, part])
                again = {prompt.uid for prompt in pending} - {report.uid for report in part.reports}
                if again:  # a worker was lost with them
                    self.note_losses()
                lost = {report.uid for report in part.reports if report.engine_was_lost}
                if lost and num_recoveries < MAX_RECOVERIES and self.sync.recover():
                    num_recoveries += 1
                    again |= lost
                pending = [prompt for prompt in prompts if prompt.uid in again]
        latest = {report.id: row for row, report in enumerate(batch.reports)}
        return batch.take(
            [latest[f"{prompt.uid}/{number}"] for prompt in prompts for number in range(samples_per_prompt)]
        )

    def write_samples(
        self,
        step: int,
        episodes: RolloutBatch,
        decided: Mapping[str, SampleDecision],
        *,
        split: str,
        rows: RolloutBatch | None = None,
    ) -> None:
        """Write samples into the store of the run.

        Args:
            step, split: of the file.
            episodes: the samples.
            decided: decision about each, by its id.
            rows: the training rows of those that were trained on, whose tokens' numbers are stored with them.

        Raises:
            RunError: the disk refused.
        """
        last_rows = {} if rows is None else rows.last_rows
        objects: dict[str, list[Any]] = {"decided": [decided[report.id] for report in episodes.reports]}
        objects["has_numbers"] = [report.id in last_rows for report in episodes.reports]
        columns = episodes.rows.union(DataProto.from_dict({}, non_tensors=objects))
        if rows is not None and last_rows:  # a sample without rows gets those of another, which nobody reads
            row_numbers = [last_rows.get(report.id, 0) for report in episodes.reports]
            columns = columns.union(rows.rows.select(rows.token_numbers, []).take(row_numbers))

        def write() -> None:
            self.rollout.call.write_samples(step, columns, split=split, ranks=self.rollout.ranks)

        self.again_after_loss(write)

    def note_losses(self) -> None:
        """Report rollout workers that were lost, and start others.

        Raises:
            WorkerLost: they were lost too often in this step.
        """
        assert self.workers is not None, "only workers that can be replaced are left out of a result"
        self.workers.note_losses()

    def again_after_loss(self, call: Callable[[], T]) -> T:
        """The result of a call of the rollout workers, made again where one of them is lost meanwhile.

        Raises:
            WorkerLost: they were lost too often in this step.
        """
        while True:
            try:
                return call()
            except WorkerLost:
                self.note_losses()


def start_runtime(config: Config, *, log_dir: Path | None) -> Runtime:
    """The runtime that `resources` asks for.

    Args:
        config: its `resources` say where.
        log_dir: where worker processes write what they print.

    Raises:
        ModuleNotFoundError: Ray is not installed.
    """
    if config.resources.runtime == "inline":
        return InlineRuntime()
    from strop.trainer.ray_runtime import make_runtime  # ray: seconds

    return make_runtime(config.resources, log_dir=log_dir, devices=rollout_devices(config))


def rollout_devices(config: Config) -> dict[str, RankDevices]:
    """Devices of each process of a role, where it may have several."""
    rollout = config.rollout
    return {"rollout": RankDevices(count=rollout.num_devices, over_nodes=rollout.spans_nodes)}


def rollout_settings(
    config: Config,
    *,
    version: int = 0,
    samples: Path | None = None,
    logs: Path | None = None,
    is_replayed: bool = False,
) -> RolloutSettings:
    """Settings of the rollout role of a run.

    Args:
        config: of the run.
        version: policy version that the weights hold: the steps done so far.
        samples: folder of the sample store, which rollout workers write to; None for no samples.
        logs: folder for what reward functions print; None: it is not kept.
        is_replayed: requests wait for the versions that sampled them in another run.
    """
    return RolloutSettings(
        agent=config.agent.with_absolute_paths(),
        template_options=config.data.chat_template_kwargs,
        max_prompt_tokens=config.data.max_prompt_tokens,
        device=device_name(config.resources.device),
        seed=config.trainer.seed,
        version=version,
        share_with=None if "rollout" in config.resources.apart else "actor",
        keeps_text="reward_model" in config.roles,
        reward_keys=tuple(config.algorithm.reward_keys),
        anchor_similarity=config.algorithm.anchor_similarity if config.compares_answers else None,
        samples=None if samples is None else samples.absolute(),
        max_tokens=config.data.max_prompt_tokens + config.data.max_response_tokens,
        logs=None if logs is None else logs.absolute(),
        keeps_rows=where_on(config.data.dataset_class) is not None,
        extensions=tuple(config.algorithm.extensions),
        is_replayed=is_replayed,
        recording=Path(config.trainer.skip_rollout).absolute() if config.trainer.skip_rollout else None,
    )


def make_cost_tracker(config: Config, folder: Path | None) -> CostTracker | None:
    """Counter of the costs of reward services; None where none has a price.

    Args:
        config, folder: of the run; no folder: nothing is remembered.

    Raises:
        RunError: the count of an earlier start is damaged.
    """
    if not any(service.has_price for service in config.reward.services.values()):
        return None
    return CostTracker(config.reward, folder)


def make_worker_groups(
    config: Config,
    runtime: Runtime,
    settings: RolloutSettings,
    *,
    num_steps: int,
    checkpoint: Path | None = None,
    optimizer: Path | None = None,
    costs: CostTracker | None = None,
) -> WorkerGroups:
    """Start every role of a run.

    Args:
        config: of the run.
        runtime: where the roles go.
        settings: as `rollout_settings` gives it.
        num_steps: training steps of the whole run; learning-rate schedules end with it.
        checkpoint: folder to continue from.
        optimizer: folder with the optimizer's state that a new run takes over from another one.
        costs: as `make_cost_tracker` gives it for the run; not given: a count that begins here and is kept nowhere.
    """
    specs = role_specs(config, settings, num_steps=num_steps, checkpoint=checkpoint, optimizer=optimizer)
    apart = config.resources.apart
    groups: dict[str, WorkerGroup[Any]] = runtime.groups(
        {name: spec for name, spec in specs.items() if name not in apart}
    )
    workers, is_elastic = None, are_replaced(config, settings)
    for name in apart:
        groups |= runtime.groups({name: specs[name]}, pool=name, is_elastic=is_elastic and name == "rollout")
    if is_elastic:  # of the Ray runtime
        group = cast("ElasticGroup[RolloutWorker]", groups["rollout"])
        workers = RolloutWorkers(group, max_losses=config.run.max_restarts, step=settings.version)
    roles = WorkerGroups(
        actor=groups["actor"],
        rollout=groups["rollout"],
        reference=groups.get("reference"),
        critic=groups.get("critic"),
        teacher=groups.get("teacher"),
        prm=groups.get("prm"),
        reward_model=groups.get("reward_model"),
        sync=_sync(config, groups, workers, version=settings.version),
        router=_router(config, runtime, groups["rollout"], settings),
        workers=workers,
        costs=costs or make_cost_tracker(config, None),
        progress=RolloutProgress(settings.logs),
        offloads_idle=config.resources.offload_idle,
    )
    if workers is not None:
        workers.router = roles.router
    roles.sync.start()
    return roles


def _router(
    config: Config, runtime: Runtime, rollout: WorkerGroup[RolloutWorker], settings: RolloutSettings
) -> Router | None:
    """Router over the engines of these workers.

    Where groups are held while their processes train, each worker has its turns, and nobody could serve the others. A
    run that is repeated samples each token where it was sampled.
    """
    has_turns = bool(config.async_setting) and "rollout" not in config.resources.apart
    is_alone = rollout.world_size == 1 or not runtime.address
    if is_alone or has_turns or settings.is_replayed or not config.rollout.load_balance:
        return None
    router = Router(runtime.address)
    runtime.on_close(router.close)
    rollout.call.join_router(router.address)
    return router


def _sync(
    config: Config, groups: Mapping[str, WorkerGroup[Any]], workers: RolloutWorkers | None, *, version: int
) -> WeightSync:
    """Weight sync from the actor to generation."""
    is_apart, is_native = "rollout" in config.resources.apart, config.rollout.engine == "native"
    if is_native and not is_apart:
        return WeightSync(rollout=groups["rollout"], version=version)
    return RemoteWeightSync(
        rollout=groups["rollout"],
        version=version,
        actor=groups["actor"],
        shares_process=not is_apart,
        probes_weights=not is_native,
        store=config.resources.weight_store,
        workers=workers,
        generates_meanwhile=bool(config.async_setting),
    )
