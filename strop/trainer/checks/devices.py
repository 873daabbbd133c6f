"""Engines and profiles that the device of a run does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.engines.megatron.checks import check_device
from strop.trainer.sections import SECTION_OF_COMMAND
from strop.utils.device import can_record_memory, device_name

if TYPE_CHECKING:
    from strop.trainer.config import Config


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
