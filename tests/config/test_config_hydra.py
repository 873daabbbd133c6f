"""What people bring along from Hydra: own base files and groups, `_self_`, `@package`, and `${...}`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from config_settings import Settings

from strop.config import ConfigError, load_config, load_layers


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A file with a base of its own, and two groups beside it."""
    write(tmp_path / "base.yaml", "steps: 2\nrollout: {temperature: 0.5}\noptim: {lr: 0.1}\n")
    write(tmp_path / "optim" / "slow.yaml", "lr: 0.001\nundocumented: 7\n")
    write(tmp_path / "optim" / "slower.yaml", "defaults: [slow]\nlr: 0.0001\n")
    write(tmp_path / "experiment" / "long.yaml", "# @package _global_\nsteps: 1000\noptim: {lr: 0.3}\n")
    return write(tmp_path / "main.yaml", "defaults:\n  - base\n  - optim: slow\nsteps: 3\n")


def load(source: Path, *overrides: str) -> Settings:
    return load_config(Settings, source=source, overrides=list(overrides))


def test_files_beside_a_configuration_are_its_bases_and_groups(project: Path) -> None:
    config = load(project)
    assert (config.steps, config.rollout.temperature) == (3, 0.5)
    assert (config.optim.lr, config.optim.undocumented) == (0.001, 7)
    origin = load_layers(Settings, source=project).source_of
    assert origin("optim.lr") == f"file {project.parent / 'optim' / 'slow.yaml'}"
    assert origin("rollout.temperature") == f"file {project.parent / 'base.yaml'}"


def test_a_group_is_chosen_on_the_command_line(project: Path) -> None:
    config = load(project, "optim=slower", "optim.undocumented=8")
    assert (config.optim.lr, config.optim.undocumented) == (0.0001, 8)
    config = load(project, "+experiment=long")
    assert (config.steps, config.optim.lr, config.optim.undocumented) == (1000, 0.3, 7)
    with pytest.raises(ConfigError, match="optim is a section without presets, so optim=fast says nothing"):
        load(project, "optim=fast")


def test_own_keys_come_where_self_stands(project: Path) -> None:
    write(project, "defaults: [_self_, base]\nsteps: 3\nalgorithm: {clip: 0.9}\n")
    assert (load(project).steps, load(project).algorithm.clip) == (2, 0.9)
    write(project, "defaults: [base, _self_]\nsteps: 3\n")
    assert load(project).steps == 3
    write(project, "defaults: [base.yaml, {optim: null}, {/optim: slow}]\n")
    assert (load(project).steps, load(project).optim.lr) == (2, 0.001)


def test_files_that_name_each_other_are_a_circle(project: Path) -> None:
    write(project.parent / "base.yaml", "defaults: [main]\n")
    with pytest.raises(
        ConfigError, match=r"main\.yaml -> .*base\.yaml -> .*main\.yaml: the defaults .* form a circle"
    ):
        load(project)


def test_a_file_with_the_name_of_a_preset_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.config.sources.PRESETS", project.parent / "presets")
    write(project.parent / "presets" / "optim" / "slow.yaml", "lr: 0.2\n")
    with pytest.raises(
        ConfigError, match=r"`slow` under defaults is both the file .*slow\.yaml and a preset"
    ):
        load(project)
    with pytest.raises(ConfigError, match=r"optim=slow is both the file .*slow\.yaml and a preset"):
        load(write(project.parent / "other.yaml", ""), "optim=slow")


def test_another_package_is_refused(project: Path) -> None:
    write(project.parent / "optim" / "slow.yaml", "# @package algorithm\nclip: 1\n")
    with pytest.raises(ConfigError, match=r"slow\.yaml begins with `# @package algorithm`"):
        load(project)


def test_interpolation_takes_the_value_of_another_key_with_its_type(tmp_path: Path) -> None:
    text = """
    steps: ${rollout.samples_per_prompt}
    rollout: {seed: "${.temperature}-${..steps}", temperature: "${optim.lr}"}
    data: {train_files: ["${reward.path}/a.parquet", b], prompts_per_step: "${steps}"}
    reward: {path: "/data/${algorithm.mode}", kwargs: {prompt: "${steps}"}}
    """
    config = load(write(tmp_path / "c.yaml", text), "rollout.samples_per_prompt=16", "algorithm.mode=sum")
    assert (config.steps, config.data.prompts_per_step) == (16, 16)
    assert config.rollout.temperature == 0.5  # the default of optim.lr in this tree
    assert config.rollout.seed == "0.5-16"
    assert config.data.train_files == ("/data/sum/a.parquet", "b")
    assert config.reward.kwargs == {"prompt": "${steps}"}  # free text stays as it is
    assert load(tmp_path / "c.yaml", "steps=${data.prompts_per_step}", "data.prompts_per_step=3").steps == 3


def test_interpolation_reads_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "steps: ${oc.env:STROP_STEPS}\nreward: {path: '${oc.env:STROP_NONE,x}/r.py'}\n"
    text += "rollout: {seed: '${oc.env:STROP_STEPS}'}\n"
    source = write(tmp_path / "c.yaml", text)
    monkeypatch.setenv("STROP_STEPS", "12")
    config = load(source)
    assert (config.steps, config.reward.path, config.rollout.seed) == (12, "x/r.py", "12")
    monkeypatch.setenv("STROP_STEPS", "many")
    with pytest.raises(ConfigError, match="steps is 'many'"):
        load(source)
    monkeypatch.delenv("STROP_STEPS")
    with pytest.raises(ConfigError, match="the variable STROP_STEPS is not set"):
        load(source)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: ${stps}", "unknown key stps; the nearest valid key is steps"),
        ("steps: ${optim}", "${optim} is a section; name a key with one value"),
        ("steps: ${reward.kwargs.strict}", "is an entry of a free dict"),
        ("steps: ${...x}", "leads above the top"),
        ("steps: ${eval:1+1}", "${eval:...} is a function of Hydra or OmegaConf that is not taken"),
        ("reward: {path: 'a${steps'}", "not closed by }"),
        ("reward: {path: 'a${data.train_files}'}", "cannot be put into a text"),
        ("rollout: {seed: '${steps}'}\nsteps: ${rollout.seed}", "these keys stand for each other"),
    ],
)
def test_what_interpolation_cannot_do_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(write(tmp_path / "c.yaml", text))


def test_nothing_is_resolved_in_a_text_that_was_handed_over(tmp_path: Path) -> None:
    text = "reward: {path: '${oc.env:HOME}'}\n"
    layers = load_layers(Settings, source=tmp_path / "config.yaml", text=text)
    assert [
        problem for problem in layers.problems if "is not resolved in the settings of a run folder" in problem
    ]
