"""A run's plan: memory of each phase, what does not fit and the smallest change, seconds of a step, a placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from strop.config.sections import where_on
from strop.rollout.native.paged_cache import POOL_SHARE
from strop.trainer.config import Config
from strop.trainer.plan.baseline import Baseline, baseline_of
from strop.trainer.plan.batches import Lengths
from strop.trainer.plan.devices import Device, device_named, this_cpu
from strop.trainer.plan.generation_memory import (
    accelerator_cache,
    held_keys,
    knows_no_validation,
    running_at_once,
)
from strop.trainer.plan.memory import phases_of
from strop.trainer.plan.pass_time import has_trial
from strop.trainer.plan.roles import RolePlan, planned_roles
from strop.trainer.plan.smallest_change import Change, smallest_change
from strop.trainer.plan.state_memory import PhaseMemory
from strop.trainer.plan.step_time import StepTime, all_devices, step_time
from strop.trainer.plan.transfer_memory import load_host_bytes
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
    changed: Plan | None
    """The run with this change."""
    num_devices: int
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
        return self.time.step * self.num_devices / 3600


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
        ValueError: an unknown device, lengths above their limits, or a model that cannot be planned.
    """
    lengths = lengths_of(config, mean_response_tokens, prompt_tokens)
    is_accelerator = (device or device_name(config.resources.device)) != "cpu"
    roles = planned_roles(config, lengths, is_accelerator=is_accelerator)
    planned_on = _device(config, device, roles[0])
    memory = memory_gib * 2**30 if memory_gib else planned_on.memory_bytes
    memory *= 1 - DEVICE_RESERVE * is_accelerator
    phases = phases_of(config, roles, device_bytes=memory if is_accelerator else None)
    process = None if is_accelerator else baseline_of(config)
    baseline = 0 if process is None else process.num_bytes
    time = step_time(config, roles, planned_on, phases)
    share = memory if is_accelerator else memory / processes_of_node(config)
    peak = max(phase.device_bytes for phase in phases) + baseline
    change = changed = None
    if peak > share and advises:
        change = smallest_change(
            config, roles, share - baseline, is_accelerator=is_accelerator, per_node=planned_on.per_node
        )
    if change is not None:
        changed = make_plan(
            change.config,
            device=device,
            memory_gib=memory_gib,
            mean_response_tokens=mean_response_tokens,
            prompt_tokens=prompt_tokens,
            advises=False,
        )
    return Plan(
        device=planned_on,
        phases=phases,
        baseline_bytes=baseline,
        load_host_bytes=load_host_bytes(roles),
        memory_bytes=share,
        time=time,
        change=change,
        changed=changed,
        num_devices=all_devices(config),
        assumptions=_assumptions(config, lengths, planned_on, roles, process, phases),
        roles=roles,
    )


def processes_of_node(config: Config) -> int:
    """Processes with a model on a machine, where those of all pools are spread evenly."""
    resources = config.resources
    return -(-(resources.ranks + sum(resources.apart.values())) // resources.nodes)


def lengths_of(config: Config, mean_response: float | None, prompt: int | None) -> Lengths:
    """Lengths of a run; arguments as of `make_plan`.

    Raises:
        ValueError: one is above its limit.
    """
    longest, longest_prompt = config.data.max_response_tokens, config.data.max_prompt_tokens
    if mean_response is not None and mean_response > longest:
        raise ValueError(
            f"--response-tokens is {mean_response:g}, above data.max_response_tokens of {longest}: give the mean of "
            f"answers that are cut there"
        )
    if prompt is not None and prompt > longest_prompt:
        raise ValueError(
            f"--prompt-tokens is {prompt}, above data.max_prompt_tokens of {longest_prompt}: a run refuses such prompts"
        )
    return Lengths(
        prompt=prompt or longest_prompt,
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

        found = getattr(torch, kind)
        memory = float(found.get_device_properties(0).total_memory)
        return replace(device_named(str(found.get_device_name(0))), memory_bytes=memory)
    text = actor.shape.config.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return this_cpu(
        dtype=actor.form.compute_dtype,
        rows=actor.on_rank(actor.usual[0]).num_tokens,
        hidden=int(text.hidden_size),
        inner=int(inner),
        num_threads=config.resources.num_threads,
        processes=processes_of_node(config),
        baseline=baseline_of(config),
    )


def _assumptions(
    config: Config,
    lengths: Lengths,
    device: Device,
    roles: Sequence[RolePlan],
    process: Baseline | None,
    phases: Sequence[PhaseMemory],
) -> list[str]:
    """Assumptions under the numbers."""
    of_lengths = (
        f"prompts of {lengths.prompt} tokens, answers of {lengths.mean_response:.0f} on average and "
        f"{lengths.max_response} at most; memory is for answers that all reach the limit"
    )
    not_counted = (
        "not counted: time of rewards, tools and validation, images, and memory of the controller's rows"
    )
    lines = [*_unsaid(roles), of_lengths, device.stated, not_counted]
    if not device.is_cpu and (line := _small_pool(config, roles[0], phases)):
        lines.append(line)
    if process is not None and not process.is_measured:
        lines.append(
            f"a process without a model could not be measured here ({process.reason}): "
            f"{process.num_bytes / 2**30:.2f} GiB, and ranks that send {process.bytes_per_s / 1e9:g} GB/s, "
            f"{process.call_s * 1e6:.0f} us a time"
        )
    elif process is not None and any(role.axes.world > 1 for role in roles):
        is_cut = any(role.axes.tensor > 1 for role in roles)
        exchanges = f", and {process.call_s * 1e6:.0f} us go to each exchange of a layer" if is_cut else ""
        lines.append(
            f"seconds are of a rank's processor: it sends {process.bytes_per_s / 1e9:.2g} GB/s{exchanges}, as two "
            f"processes had it just now; beside other programs this changes, and ranks wait for the slowest"
        )
    if config.rollout.own_processes is None and knows_no_validation(config):
        lines.append(
            "a validation of as many prompts as rollout.max_running, or as a step where that has more: "
            "data.max_val_prompts would say it"
        )
    if where_on(config.algorithm.filter_groups) is not None:
        lines.append("prompts that algorithm.filter_groups asks for again are not counted")
    if config.algorithm.resampling != "none" or config.algorithm.keep.min_score is not None:
        lines.append("each sample is trained on once: which are drawn again, or left out, their scores say")
    if device.is_cpu:
        lines.append("of the machine's memory, each process with a model has an equal part")
        if not all(has_trial(role, device) for role in roles):
            lines.append(
                "layers and head are too large to be carried out here: time is by the figures above alone"
            )
    else:
        lines.append("memory of the host is not checked: that of the devices' machines is not known here")
    if config.rollout.own_processes is not None:
        where = "its own memory is not counted" if device.is_cpu else "within its share of the device"
        lines.append(f"{config.rollout.engine} is priced like the native engine, {where}")
    if any(engine.kind == "megatron" for engine in config.used_engines.values()):
        lines.append("Megatron's engine is counted like the torch engine of the same axes")
    if any(engine.compile for engine in config.used_engines.values()):
        lines.append("compiled layers (compile of an engine) are not counted: they keep less and are faster")
    return lines


def _small_pool(config: Config, actor: RolePlan, phases: Sequence[PhaseMemory]) -> str:
    """Sentence about keys and values that have no room together; empty where they have."""
    if config.rollout.own_processes is not None:
        return ""
    held, cache = held_keys(phases), accelerator_cache(config, actor)
    if held >= cache.num_bytes:
        return ""
    return (
        f"keys and values of answers that all reach the limit need {cache.num_bytes / 2**30:.2f} GiB and get "
        f"{held / 2**30:.2f}, {POOL_SHARE:.0%} of what is free: an engine has room for about "
        f"{running_at_once(config, actor, phases)} sequences of mean length at a time; where more would run, "
        f"they wait, and what they had begun is computed again"
    )


def _unsaid(roles: Sequence[RolePlan]) -> list[str]:
    """Sizes that a config.json does not say, of each model that differs."""
    names: dict[str, list[str]] = {}
    for role in roles:
        if role.shape.unsaid:
            sizes = ", ".join(f"{name} ({value})" for name, value in role.shape.unsaid.items())
            kind = role.shape.config.get_text_config().model_type
            line = (
                f"config.json does not say {sizes}: the values are those that transformers takes for {kind}"
            )
            names.setdefault(line, []).append(role.name)
    return [f"{', '.join(of_roles)}: {line}" for line, of_roles in names.items()]
