"""Seconds of placements that fit, by parts that many of them have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from strop.trainer.config import Config
from strop.trainer.plan.candidates import Candidate, axis_values, values_of
from strop.trainer.plan.changes import with_values
from strop.trainer.plan.devices import Device
from strop.trainer.plan.generation_memory import apart_phase, running_at_once
from strop.trainer.plan.generation_time import GenerationTime, engines_of, generation_time
from strop.trainer.plan.memory import least_bytes, training_phases
from strop.trainer.plan.roles import RolePlan
from strop.trainer.plan.state_memory import PhaseMemory
from strop.trainer.plan.step_time import TrainingTime, joined, training_time, with_running


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """The ranks that train, of all placements in which they are alike."""

    roles: Sequence[RolePlan]
    time: TrainingTime
    phases: Sequence[PhaseMemory]


class Prices:
    """Seconds of placements that fit, of parts that are priced once: training by its ranks and axes, generation by its
    engines. Only a run's configuration costs more, so that the settings of most are never put together."""

    def __init__(self, config: Config, roles: Sequence[RolePlan], device: Device, available: float) -> None:
        self._config, self._roles, self._device, self._available = config, roles, device, available
        self._configs: dict[Hashable, Config | None] = {}
        self._trained: dict[Hashable, _Trained | None] = {}
        self._phases_apart: dict[Hashable, PhaseMemory] = {}
        self._generated: dict[Hashable, GenerationTime] = {}

    def step_seconds(self, candidate: Candidate) -> float | None:
        """Of a step; None where it does not fit, or its generation cannot be set so."""
        config = self._of_generation(candidate)
        if config is None or (trained := self._of_training(candidate, config)) is None:
            return None
        actor = trained.roles[0]
        phases = trained.phases
        if candidate.apart:
            phases = [self._apart(candidate, config, actor)]
            if phases[0].device_bytes > self._available:
                return None
        generation = self._generation(candidate, config, actor, phases)
        return joined(config, actor, self._device, generation, trained.time).step

    def _of_generation(self, candidate: Candidate) -> Config | None:
        """A run that generates so, whatever its other settings."""
        key = candidate.apart, candidate.engine_ranks
        if key not in self._configs:
            plain = dataclasses.replace(candidate, tensor=1, pipeline=1, experts=1, checkpointing=True)
            try:
                placed = with_values(self._config, values_of(self._config, plain, self._device.per_node))
            except ValueError:
                self._configs[key] = None
            else:
                self._configs[key] = placed
        return self._configs[key]

    def _of_training(self, candidate: Candidate, config: Config) -> _Trained | None:
        key = (
            candidate.main, candidate.apart > 0, candidate.tensor, candidate.pipeline, candidate.experts,
            candidate.checkpointing,
        )  # fmt: skip
        if key not in self._trained:
            self._trained[key] = self._train(candidate, config)
        return self._trained[key]

    def _train(self, candidate: Candidate, config: Config) -> _Trained | None:
        roles = [
            role.placed(candidate.main, checkpointing=candidate.checkpointing, **axis_values(candidate))
            for role in self._roles
        ]
        available = self._available
        try:
            if least_bytes(config, roles, device_bytes=available) > available:
                return None
            phases = training_phases(config, roles, device_bytes=available)
        except ValueError:  # a sequence above the budget
            return None
        if max(phase.device_bytes for phase in phases) > available:
            return None
        time = training_time(config, roles, self._device)
        return _Trained(roles=roles, time=time, phases=phases)

    def _apart(self, candidate: Candidate, config: Config, actor: RolePlan) -> PhaseMemory:
        key = candidate.apart, candidate.engine_ranks, actor.form
        if key not in self._phases_apart:
            self._phases_apart[key] = apart_phase(config, actor, self._available)
        return self._phases_apart[key]

    def _generation(
        self, candidate: Candidate, config: Config, actor: RolePlan, phases: Sequence[PhaseMemory]
    ) -> GenerationTime:
        running = running_at_once(config, actor, phases)
        key = candidate.apart, candidate.engine_ranks, engines_of(config, actor), actor.form, running
        if key not in self._generated:
            self._generated[key] = generation_time(with_running(config, running), actor, self._device)
        return self._generated[key]
