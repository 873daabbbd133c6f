"""Engines that do not compute on the device of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.engines.megatron.checks import check_device
from strop.trainer.sections import SECTION_OF_COMMAND
from strop.utils.device import device_name

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check_devices(config: Config, command: str) -> None:
    """Refuse an engine that a run uses and its device is not for.

    Args:
        config: of the run.
        command: word of the command, such as `train` or `sft`.

    Raises:
        ValueError: the sentence names the role, or the device is not on this machine.
    """
    section = SECTION_OF_COMMAND.get(command)
    engines = config.used_engines if section is None else {section: getattr(config, section).engine}
    for role, engine in engines.items():
        if engine.kind == "megatron":
            check_device(device_name(config.resources.device), section=f"{role}.engine")
