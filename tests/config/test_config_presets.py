from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from strop.algorithms.config import AlgorithmConfig
from strop.config import ConfigError, load_config, preset_names
from strop.config.sources import PRESETS


@dataclass(frozen=True, kw_only=True)
class Root:
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)


def test_every_preset_file_is_reached_by_a_name() -> None:
    sections = [
        "",
        *(".".join(path.relative_to(PRESETS).parts) for path in PRESETS.rglob("*") if path.is_dir()),
    ]
    named = [PRESETS.joinpath(*s.split("."), f"{name}.yaml") for s in sections for name in preset_names(s)]
    assert sorted(named) == sorted(path for path in PRESETS.rglob("*") if path.is_file())
    assert {"grpo", "dr_grpo"} <= set(preset_names("algorithm"))


@pytest.mark.parametrize("name", preset_names("algorithm"))
def test_an_algorithm_preset_sets_what_its_file_says(name: str) -> None:
    wanted = yaml.safe_load(Path(PRESETS, "algorithm", f"{name}.yaml").read_text(encoding="utf-8"))
    overrides = [f"algorithm={name}"]
    if wanted.get("loss_agg_mode") == "seq-mean-token-sum-norm":
        overrides.append("algorithm.loss_scale_factor=512")
    built = load_config(Root, overrides=overrides).algorithm
    assert {key: getattr(built, key) for key in wanted} == wanted


def test_dr_grpo_asks_for_its_constant() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.loss_scale_factor"):
        load_config(Root, overrides=["algorithm=dr_grpo"])
