"""OpenRLHF's flags since they carry dots (`--actor.adam.lr`), under the names that their rows have."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from strop.compat.migrate.source import Found

_SUPERVISED = ("train_sft", "train_dpo", "train_kto", "train_rm")
_REINFORCED = "train_ppo_ray"
CRITICS = (
    "critic.adam.betas",
    "critic.adam.weight_decay",
    "critic.lr_scheduler",
    "critic.lr_warmup_ratio",
)
"""Rows of a critic whose defaults differ from ours."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """Names and defaults of the versions whose flags have dots, for one program."""

    before: Mapping[str, str]
    """Earlier name of each flag."""
    defaults: Mapping[str, Any]
    """Defaults that differ from the earlier ones."""
    written_out: tuple[str, ...]
    """Rows whose defaults differ from ours, beside those of before."""
    never: tuple[str, ...]
    """Rows of before that there is no flag for."""


@cache
def names_of(program: str) -> Names:
    """The names of a program's flags."""
    file = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    sections = ("all", "supervised" if program in _SUPERVISED else _REINFORCED)

    def merged(table: str) -> dict[str, Any]:
        return {key: value for section in sections for key, value in file[table].get(section, {}).items()}

    written = file["written_out"]
    return Names(
        before=merged("names"),
        defaults=merged("defaults"),
        written_out=tuple(name for section in sections for name in written.get(section, "").split()),
        never=tuple(written["never"].split()),
    )


def has_dotted_flags(settings: Sequence[Found]) -> bool:
    """True where a script is written for a version whose flags have dots."""
    return any("." in setting.key and not setting.key.startswith("runtime_env") for setting in settings)


def with_names_of_rows(settings: Sequence[Found], program: str) -> tuple[Found, ...]:
    """Every flag under the name that its row has."""
    before = names_of(program).before
    return tuple(
        dataclasses.replace(setting, key=before[setting.key], written=setting.key)
        if setting.key in before
        else setting
        for setting in settings
    )
