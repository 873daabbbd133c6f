"""Files of a user's own are imported when a configuration is loaded, not when one is made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.algorithms.config import AlgorithmConfig
from strop.config import ConfigError, load_config, save_config
from strop.data.config import DataConfig
from strop.data.curriculum import SAMPLERS
from strop.trainer.config import Config
from strop.trainer.loading import load, read, with_extensions
from strop.trainer.sections import TrainerConfig
from strop.trainer.start import start_run
from strop.utils import trust

SAMPLER = """
import sys
from strop.data import register_sampler

sys.imported_by_strop = True

@register_sampler("backwards")
def backwards(rows):
    return rows[::-1]
"""


@pytest.fixture
def extension(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "mine.py").write_text(SAMPLER, encoding="utf-8")
    known = dict(SAMPLERS)
    yield str(tmp_path / "mine.py")
    if hasattr(sys, "imported_by_strop"):
        del sys.imported_by_strop
    SAMPLERS.clear()
    SAMPLERS.update(known)


def made(extension: str, **data: object) -> Config:
    return Config(
        algorithm=AlgorithmConfig(extensions=(extension,)),
        data=DataConfig(sampler="backwards", **data),  # type: ignore[arg-type]
        trainer=TrainerConfig(max_steps=1),
    )


def test_making_a_configuration_imports_nothing_of_the_users(extension: str) -> None:
    config = made(extension)
    assert not hasattr(sys, "imported_by_strop")
    assert load_config(Config, overrides=[f"algorithm.extensions=['{extension}']"]).algorithm.extensions
    assert not hasattr(sys, "imported_by_strop")
    assert with_extensions(config) is config
    assert hasattr(sys, "imported_by_strop")
    config.check()


def test_what_names_say_is_checked_once_the_files_are_imported(extension: str, tmp_path: Path) -> None:
    config = made(extension, reorder_every=2)  # backwards looks at no results
    refusal = "data.reorder_every is 2, but data.sampler=backwards does not look at results"
    with pytest.raises(ConfigError, match=refusal):
        start_run(tmp_path / "run", config, command=["strop", "train"])
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=refusal):
        made(extension, reorder_every=2)  # the name is known now
    overrides = [f"algorithm.extensions=['{extension}']", "data.sampler=backwards"]
    with pytest.raises(ConfigError, match=refusal):
        load(overrides=[*overrides, "data.reorder_every=2"])
    save_config(load(overrides=overrides), tmp_path / "config.yaml")
    assert read(tmp_path / "config.yaml").data.sampler == "backwards"


def test_a_name_that_no_file_registers_is_refused_when_they_are_loaded(extension: str) -> None:
    overrides = [f"algorithm.extensions=['{extension}']", "data.sampler=sideways"]
    with pytest.raises(ConfigError, match="unknown sampler 'sideways'; known: backwards, easy_first"):
        load(overrides=overrides)
    with pytest.raises(ConfigError, match="unknown sampler 'sideways'"):
        load(overrides=overrides[1:])


def test_settings_that_are_only_looked_at_import_nothing(extension: str) -> None:
    with trust.door():
        trust.close("somebody's run")
        config = load(overrides=[f"algorithm.extensions=['{extension}']", "data.sampler=backwards"])
    assert config.data.sampler == "backwards"
    assert not hasattr(sys, "imported_by_strop")


def test_settings_with_built_in_names_are_checked_though_there_are_extensions(extension: str) -> None:
    with pytest.raises(ValueError, match="compares the samples of one prompt"):
        load_config(
            Config, overrides=[f"algorithm.extensions=['{extension}']", "rollout.samples_per_prompt=1"]
        )
