"""A run's plan: memory of each phase, what does not fit and the smallest change, seconds of a step, a placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.trainer.config import Config
from strop.trainer.plan.baseline import baseline_bytes
from strop.trainer.plan.batches import Lengths
from strop.trainer.plan.devices import Device, device_named, this_cpu
from strop.trainer.plan.memory import PhaseMemory, load_host_bytes, phases_of
from strop.trainer.plan.roles import RolePlan, planned_roles
from strop.trainer.plan.smallest_change import Change, smallest_change
from strop.trainer.plan.step_time import StepTime, step_time
from strop.utils.device import device_name

DEVICE_RESERVE = 0.06
"""Share of an accelerator that the driver, kernels and the allocator's gaps take."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory and time that a run will take, and what to change."""

    device: Device
    phases: Sequence[PhaseMemory]
    baseline_bytes: int
    """Of a process without a model, in its peak; 0 on an accelerator, where it is not on the device."""
    load_host_bytes: float
    """Host memory of a process while the model is loaded."""
    memory_bytes: float
    """That a rank may take."""
    time: StepTime
    change: Change | None
    """The smallest change with which it fits; None where it fits, or no change is known."""
    ranks: int
    """Of all pools."""
    assumptions: Sequence[str]
    roles: Sequence[RolePlan]

    @property
    def peak(self) -> PhaseMemory:
        """The phase with most."""
        return max(self.phases, key=lambda phase: phase.device_bytes)

    @property
    def peak_phase(self) -> str:
        """Its name."""
        return self.peak.phase

    @property
    def peak_bytes(self) -> int:
        """Most memory of a rank."""
        return self.peak.device_bytes + self.baseline_bytes

    @property
    def fits(self) -> bool:
        """No phase takes more than there is."""
        return self.peak_bytes <= self.memory_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.time.step

    @property
    def seconds_by_stage(self) -> Mapping[str, float]:
        """Seconds of its stages."""
        return self.time.stages

    @property
    def device_hours_per_step(self) -> float:
        """Hours of devices that a step costs."""
        return self.time.step * self.ranks / 3600


def make_plan(
    config: Config,
    *,
    device: str = "",
    memory_gib: float | None = None,
    mean_response_tokens: float | None = None,
    prompt_tokens: int | None = None,
    advises: bool = True,
) -> Plan:
    """Plan a run.

    Args:
        config: of the run.
        device: name of a device (`devices.py`), or cpu; empty: that of resources.device on this machine.
        memory_gib: memory of a device, in place of that of its name.
        mean_response_tokens: of an answer; None: half of data.max_response_tokens.
        prompt_tokens: of a prompt; None: data.max_prompt_tokens.
        advises: look for the smallest change where it does not fit.

    Raises:
        ValueError: an unknown device, or a model that cannot be planned.
    """
    lengths = lengths_of(config, mean_response_tokens, prompt_tokens)
    is_accelerator = (device or device_name(config.resources.device)) != "cpu"
    roles = planned_roles(config, lengths, is_accelerator=is_accelerator)
    planned_on = _device(config, device, roles[0])
    memory = (
        memory_gib * 2**30 if memory_gib else planned_on.memory_bytes * (1 - DEVICE_RESERVE * is_accelerator)
    )
    phases = phases_of(config, roles, device_bytes=memory if is_accelerator else None)
    baseline = 0 if is_accelerator else baseline_bytes(uses_ray=config.resources.runtime == "ray")
    time = step_time(config, roles, planned_on)
    processes = 1 if is_accelerator else max(1, config.resources.ranks)
    share = memory / processes
    peak = max(phase.device_bytes for phase in phases) + baseline
    change = None
    if peak > share and advises:
        change = smallest_change(config, lengths, share - baseline, is_accelerator=is_accelerator)
    return Plan(
        device=planned_on,
        phases=phases,
        baseline_bytes=baseline,
        load_host_bytes=load_host_bytes(roles),
        memory_bytes=share,
        time=time,
        change=change,
        ranks=config.resources.ranks + sum(config.resources.apart.values()),
        assumptions=_assumptions(config, lengths, planned_on),
        roles=roles,
    )


def lengths_of(config: Config, mean_response: float | None, prompt: int | None) -> Lengths:
    """Lengths of a run; arguments as of `make_plan`."""
    longest = config.data.max_response_tokens
    return Lengths(
        prompt=prompt or config.data.max_prompt_tokens,
        mean_response=float(mean_response or longest / 2),
        max_response=longest,
    )


def _device(config: Config, name: str, actor: RolePlan) -> Device:
    """The device that a run is planned for."""
    if name and name != "cpu":
        return device_named(name)
    kind = name or device_name(config.resources.device)
    if kind != "cpu":
        import torch  # only where there is an accelerator

        return device_named(
            str(getattr(torch, kind).get_device_name()).replace("NVIDIA", "").split("GB")[0].strip()
        )
    text = actor.shape.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return this_cpu(
        dtype=actor.form.compute_dtype,
        rows=actor.on_rank(actor.usual[0]).num_tokens,
        hidden=int(text.hidden_size),
        inner=int(inner),
        num_threads=config.resources.num_threads,
    )


def _assumptions(config: Config, lengths: Lengths, device: Device) -> list[str]:
    """Assumptions under the numbers."""
    of_lengths = (
        f"prompts of {lengths.prompt} tokens, answers of {lengths.mean_response:.0f} on average and "
        f"{lengths.max_response} at most; memory is for answers that all reach the limit"
    )
    not_counted = (
        "not counted: time of rewards, tools and validation, images, and memory of the controller's rows"
    )
    lines = [of_lengths, device.stated, not_counted]
    if config.rollout.own_processes is not None:
        lines.append(
            f"{config.rollout.engine} is priced like the native engine, within its share of the device"
        )
    if any(engine.kind == "megatron" for engine in config.used_engines.values()):
        lines.append("Megatron's engine is counted like the torch engine of the same axes")
    if any(engine.compile for engine in config.used_engines.values()):
        lines.append("actor.engine.compile is not counted: it keeps less and is faster")
    return lines
