"""Devices and cores of this machine that are not those that a run, its engines and its profile need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.engines.megatron.checks import check_device
from strop.trainer.sections import SECTION_OF_COMMAND
from strop.utils.device import can_record_memory, device_name

if TYPE_CHECKING:
    from strop.trainer.config import Config
    from strop.trainer.sections import ResourcesConfig


def check_devices(config: Config, command: str) -> None:
    """Refuse an engine that a run uses and its device is not for, and a history of its memory that it does not keep.

    Args:
        config: of the run.
        command: word of the command, such as `train` or `sft`.

    Raises:
        ValueError: the sentence names the role or the setting, or the device is not on this machine.
    """
    if config.trainer.profile_memory and not can_record_memory(
        device := device_name(config.resources.device)
    ):
        raise ValueError(
            f"trainer.profile_memory records CUDA's allocations, but the run computes on {device}: leave it out, or "
            f"set resources.device=cuda"
        )
    section = SECTION_OF_COMMAND.get(command)
    engines = config.used_engines if section is None else {section: getattr(config, section).engine}
    for role, engine in engines.items():
        if engine.kind == "megatron":
            check_device(device_name(config.resources.device), section=f"{role}.engine")


def check_cores(resources: ResourcesConfig) -> None:
    """Refuse more processes than a private cluster, which is this machine alone, has cores for. Other clusters are
    asked once they are reached, and a run that may be smaller (min_nodes) takes fewer processes.

    Raises:
        ValueError: the sentence says how many there are.
    """
    if resources.runtime != "ray" or resources.address or resources.min_nodes:
        return
    from strop.controller.ray.cluster import private_cores  # imports Ray

    num_processes = resources.ranks + sum(resources.apart.values())
    needed, cores = num_processes * resources.cpus_per_rank, private_cores()
    lower = "resources.ranks or resources.apart" if resources.apart else "resources.ranks"
    if cores is not None and needed > cores + 1e-6:
        raise ValueError(
            f"{num_processes} processes (resources.ranks and resources.apart) with "
            f"resources.cpus_per_rank={resources.cpus_per_rank:g} need {needed:g} CPU cores, and this machine has "
            f"{cores}: lower {lower}, lower resources.cpus_per_rank (a fraction lets processes share a core), "
            f"or name a cluster in resources.address"
        )
