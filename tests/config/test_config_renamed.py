"""Keys that were renamed are taken under their old name, with a sentence, wherever settings come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.config import ConfigError, load_config, read_config, save_config
from strop.config.explanation import explain
from strop.config.schema import REMOVED, RENAMED, tree
from strop.rewards.config import OnFailureConfig
from strop.trainer.config import Config

NEEDED = ("model.path=m", "data.train_files=[a.parquet]")
SENTENCE = "reward.policies is called reward.on_failure since 0.2; it was taken as that"
OLD = "reward: {policies: {error: fixed, timeout: retry}, failed_score: -1.0}\n"


def loaded(*overrides: str, source: Path | None = None) -> OnFailureConfig:
    return load_config(Config, source=source, overrides=[*NEEDED, *overrides]).reward.on_failure


def test_every_new_name_exists_and_no_old_one() -> None:
    keys = set(tree(Config))
    assert set(RENAMED.values()) <= keys
    assert not set(RENAMED) & keys
    assert not set(REMOVED) & keys


def test_a_file_may_give_the_old_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(OLD)
    assert loaded(source=file) == OnFailureConfig(error="fixed", timeout="retry")
    assert caplog.messages == [SENTENCE]


@pytest.mark.parametrize(
    "overrides",
    [
        ("reward.policies.error=retry",),
        ("reward.policies={error: retry}",),
        ("reward={policies: {error: retry}}",),
        ("reward.on_failure.error=fixed", "~reward.policies.error", "reward.policies.error=retry"),
    ],
)
def test_an_override_may_give_the_old_name(
    overrides: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert loaded(*overrides) == OnFailureConfig(error="retry")
    assert set(caplog.messages) == {SENTENCE}


def test_settings_of_a_saved_run_may_have_the_old_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, config = tmp_path / "config.yaml", load_config(Config, overrides=NEEDED)
    save_config(config, file)
    text = file.read_text()
    assert "  on_failure:\n" in text
    file.write_text(text.replace("  on_failure:\n", "  policies:\n"))
    assert read_config(Config, file) == config
    assert caplog.messages == [SENTENCE]


def test_settings_of_a_saved_run_may_have_removed_keys_at_their_default(tmp_path: Path) -> None:
    file, config = tmp_path / "config.yaml", load_config(Config, overrides=NEEDED)
    save_config(config, file)
    text = file.read_text()
    removed = "trainer:\n  clock: wall\n  clock_lengths: ''\n  clock_latencies: ''\n"
    file.write_text(text.replace("trainer:\n", removed, 1))
    assert read_config(Config, file) == config
    file.write_text(text.replace("trainer:\n", "trainer:\n  clock: virtual\n", 1))
    with pytest.raises(ConfigError, match="unknown key trainer.clock"):
        read_config(Config, file)


def test_both_names_at_once_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("reward: {policies: {error: fixed}, on_failure: {error: retry}}\n")
    both = "reward.policies and reward.on_failure, its name since 0.2, are both given: keep reward.on_failure"
    with pytest.raises(ConfigError, match=both):
        loaded(source=file)
    with pytest.raises(ConfigError, match=both):
        loaded("reward={policies: {error: fixed}, on_failure: {error: retry}}")


def test_what_is_no_section_is_said_as_ever(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("reward: 3\n")
    with pytest.raises(ConfigError, match=r"reward is 3 .*, but it is a section with the keys"):
        loaded(source=file)


def test_explain_takes_the_old_name() -> None:
    assert explain(Config, "reward.policies.error").key == "reward.on_failure.error"
