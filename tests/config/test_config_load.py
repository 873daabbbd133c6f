from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from config_settings import (
    AlgorithmSettings,
    OptimSettings,
    RolloutSettings,
    Settings,
    ToolSettings,
)

from strop.config import ConfigError, load_config, sections

FILES = "data.train_files=[a.parquet]"


def load(*overrides: str, source: Path | str | None = None) -> Settings:
    return load_config(Settings, source=source, overrides=[FILES, *overrides])


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "presets"
    (root / "algorithm").mkdir(parents=True)
    write(root / "small.yaml", "defaults: [algorithm: soft]\nsteps: 3\nrollout: {temperature: 0.5}\n")
    write(root / "algorithm" / "soft.yaml", "clip: 0.4\nkl: true\n")
    write(root / "algorithm" / "hard.yaml", "mode: sum\n")
    monkeypatch.setattr("strop.config.sources.PRESETS", root)
    return root


def test_defaults_alone_are_the_dataclass_defaults() -> None:
    config = load()
    assert config.data.train_files == ("a.parquet",)
    assert (config.steps, config.rollout) == (10, RolloutSettings())


def test_a_section_of_which_nothing_is_given_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    check = sections.check_fields
    monkeypatch.setattr(
        sections, "check_fields", lambda made, key: [checked.append(type(made)), check(made, key)]
    )
    assert load("rollout.temperature=2").rollout.temperature == 2
    assert (checked.count(RolloutSettings), checked.count(OptimSettings)) == (2, 1)


def test_overrides_set_every_kind_of_field() -> None:
    config = load(
        "steps=7",
        "rollout.temperature=2",
        "rollout.stop=[a,'b, c']",
        "optim.betas=[0.5,1]",
        "optim.max_grad_norm=1e-2",
        "data.shuffle=false",
        "algorithm.mode=mean-of-means",
        "reward.path='~/my reward.py'",
        "tools=[{name:calc},{name:web,limit:3}]",
    )
    assert config.steps == 7
    assert config.rollout.temperature == 2.0
    assert isinstance(config.rollout.temperature, float)
    assert config.rollout.stop == ("a", "b, c")
    assert config.optim.betas == (0.5, 1.0)
    assert config.optim.max_grad_norm == 0.01
    assert config.data.shuffle is False
    assert config.algorithm.mode == "mean-of-means"
    assert config.reward.path == "~/my reward.py"
    assert config.tools == (ToolSettings(name="calc"), ToolSettings(name="web", limit=3))


def test_a_later_override_wins_and_a_reset_goes_back_to_the_default(tmp_path: Path) -> None:
    source = write(tmp_path / "c.yaml", "steps: 3\noptim: {lr: 0.1, undocumented: 4}\n")
    assert load("steps=4", "steps=5", source=source).steps == 5
    assert load("~steps", source=source).steps == 10
    assert load("~optim", source=source).optim == OptimSettings(lr=0.5)
    assert load("~steps", "steps=6", source=source).steps == 6


def test_a_section_keeps_its_own_default_beside_the_keys_given() -> None:
    assert load("optim.undocumented=1").optim == OptimSettings(lr=0.5, undocumented=1)


def test_a_free_dict_is_one_value_that_overrides_below_it_extend(tmp_path: Path) -> None:
    assert load("+reward.kwargs.tries=3").reward.kwargs == {"strict": True, "tries": 3}
    assert load("reward.kwargs.strict=false").reward.kwargs == {"strict": False}
    assert load("reward.kwargs.a.b=[1,{c:null}]", "~reward.kwargs.strict").reward.kwargs == {
        "a": {"b": [1, {"c": None}]}
    }
    source = write(tmp_path / "c.yaml", "reward: {kwargs: {depth: 2}, weights: {format: 0.5}}\n")
    config = load(source=source)
    assert config.reward.kwargs == {"depth": 2}
    assert config.reward.weights == {"format": 0.5}
    assert load("reward.weights.answer=1", source=source).reward.weights == {"format": 0.5, "answer": 1.0}


def test_a_loaded_dict_is_no_part_of_a_default() -> None:
    load("reward.kwargs.tries=3").reward.kwargs["strict"] = False
    assert load().reward.kwargs == {"strict": True}


def test_one_plus_and_two_set_a_key_as_none_does() -> None:
    assert load("+steps=3").steps == 3
    assert load("steps=4", "++steps=3", "++reward.kwargs.tries=2").steps == 3
    with pytest.raises(ConfigError, match="unknown key stps; the nearest valid key is steps"):
        load("++stps=3")


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("rollout.temprature=1", "rollout.temperature"),
        ("temperature=1", "rollout.temperature"),
        ("algoritm.clip=1", "algorithm.clip"),
        ("rollout.lr=1", "optim.lr"),
        ("data.train_file=x", "data.train_files"),
        ("~step", "steps"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(override: str, nearest: str) -> None:
    key = override.partition("=")[0].lstrip("~")
    with pytest.raises(ConfigError, match=f"^unknown key {key}; the nearest valid key is {nearest}$"):
        load(override)


def test_an_unknown_key_like_no_other_names_the_keys_of_its_section() -> None:
    with pytest.raises(ConfigError, match=r"unknown key optim\.qqqqqq; optim has the keys lr, betas"):
        load("optim.qqqqqq=1")
    with pytest.raises(ConfigError, match=r"unknown key qqq; the top level has the keys data, rollout"):
        load("qqq=1")


def test_a_key_below_a_value_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"unknown key steps\.first: steps is a value \(a whole number\)"):
        load("steps.first=1")


def test_unknown_keys_of_a_file_name_the_file(tmp_path: Path) -> None:
    source = write(tmp_path / "my.yaml", "rolout:\n  temperature: 1.0\nrollout:\n  tmperature: 1.0\n")
    with pytest.raises(ConfigError) as caught:
        load(source=source)
    assert (
        f"unknown key rolout.temperature (in {source}, line 2); the nearest valid key is rollout.temperature"
        in str(caught.value)
    )
    assert (
        f"unknown key rollout.tmperature (in {source}, line 4); the nearest valid key is rollout.temperature"
        in str(caught.value)
    )


def test_unknown_keys_inside_a_list_name_the_place() -> None:
    with pytest.raises(ConfigError, match=r"unknown key tools\[1\]\.limits; did you mean limit\?"):
        load("tools=[{name:a},{name:b,limits:2}]")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=eight", "steps is 'eight', but it needs a whole number"),
        ("steps=1e3", "steps is 1e3, but it needs a whole number; write 1000"),
        ("steps=true", "steps is true, but it needs a whole number"),
        ("steps=null", "steps is null, but it needs a whole number"),
        ("rollout.temperature=hot", "rollout.temperature is 'hot', but it needs a number"),
        ("rollout.temperature=nan", "rollout.temperature is nan, but it needs a number"),
        ("rollout.temperature=true", "rollout.temperature is true, but it needs a number"),
        ("data.shuffle=yes", "data.shuffle is 'yes', but it needs true or false"),
        ("data.shuffle=1", "data.shuffle is 1, but it needs true or false"),
        ("reward.path=12", "reward.path is 12, but it needs text; to make it text"),
        (
            "data.train_files=a.parquet",
            "needs list, each entry text; for a list of one, write 'data.train_files=[a.parquet]'",
        ),
        ("data.train_files=[a,3]", "data.train_files[1] is 3, but it needs text"),
        ("optim.betas=[0.1]", "optim.betas is [0.1], but it needs list of 2: a number, a number"),
        (
            "optim.max_grad_norm=off",
            "optim.max_grad_norm is 'off', but it needs a finite number above 0 or null",
        ),
        (
            "algorithm.mode=meen",
            "is 'meen', but it needs one of mean, sum, mean-of-means; did you mean mean?",
        ),
        ("algorithm.mode=1", "algorithm.mode is 1, but it needs one of mean"),
        ("rollout.seed=1.5", "rollout.seed is 1.5, but it needs a whole number or text"),
        ("reward.kwargs=3", "reward.kwargs is 3, but it needs mapping of names to any value"),
        ("reward.kwargs={1:2}", "reward.kwargs has the entry 1, but names are text"),
        ("reward.kwargs={a:[{1:2}]}", "reward.kwargs.a[0] has the entry 1, but names are text"),
        ("reward.weights={1:1}", "reward.weights has the entry 1, but names are text"),
        (
            "reward.weights={a:x}",
            "reward.weights.a is 'x', but it needs a number of at least 0 and at most 1",
        ),
        (
            "reward.weights={a:1.5}",
            "reward.weights.a is 1.5, but it needs a number of at least 0 and at most 1",
        ),
        (
            "rollout.samples_per_prompt=0",
            "rollout.samples_per_prompt is 0, but it needs a whole number of at least 1",
        ),
        ("tools=[{limit:0}]", "tools[0].limit is 0, but it needs a whole number of at least 1"),
        (
            "optim.max_grad_norm=inf",
            "optim.max_grad_norm is inf, but it needs a finite number above 0 or null",
        ),
        ("rollout=3", "rollout is 3, but it is a section with the keys temperature, samples_per_prompt"),
        ("~reward.kwargs.missing", "~reward.kwargs.missing has nothing to remove"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_key_value_and_type(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_with_dots_in_a_file_is_answered_with_how_it_is_nested(tmp_path: Path) -> None:
    source = write(tmp_path / "my.yaml", "optim.lr: 0.1\nsteps: 3\n")
    with pytest.raises(ConfigError) as caught:
        load(source=source)
    dotted = f"the key optim.lr (in {source}) has dots, as on the command line"
    assert str(caught.value) == f"{dotted}: in a file write optim: {{lr: ...}}"


def test_a_wrong_value_of_a_file_names_the_file(tmp_path: Path) -> None:
    source = write(tmp_path / "my.yaml", "optim:\n  betas: [0.1, x]\n")
    with pytest.raises(ConfigError) as caught:
        load(source=source)
    assert str(caught.value) == f"optim.betas[1] is 'x' (in {source}, line 2), but it needs a number"
    assert load("optim.betas=[1,1]", source=source).optim.betas == (1.0, 1.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "'steps' is not an override: write key=value, as in trainer.seed=1"),
        ("=", "'=' has no key: write key=value, as in trainer.seed=1, without spaces around ="),
        ("steps=1,2", "is a sweep over several runs"),
        ("reward.path=a=b", "cannot be read"),
        ("reward.path=~/x.py", "put a value with special characters in quotes"),
        ("steps@here=1", "names a package after @"),
        ("~steps=3", "write it without a value, ~steps"),
        (
            "data.train_files=['${now:%Y}']",
            "${now:...} is a function of Hydra or OmegaConf that is not taken",
        ),
    ],
)
def test_what_hydra_could_do_and_strop_does_not_is_an_error(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert message in str(caught.value)


def test_a_check_of_a_dataclass_passes_through_unchanged() -> None:
    with pytest.raises(ConfigError, match=r"^tools and algorithm\.kl exclude each other; set one of them$"):
        load("tools=[{}]", "algorithm.kl=true")


def test_all_problems_of_one_load_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Settings, overrides=["rollout.temperature=-1", "stps=3", "optim.lr=x", "algorithm=none"])
    text = str(caught.value)
    assert text.startswith("4 problems in the configuration:\n  - ")
    assert (
        "rollout.temperature is -1, but it needs a number above 0: greedy decoding is for evaluation" in text
    )
    assert "the nearest valid key is steps" in text
    assert "optim.lr is 'x', but it needs a number" in text
    assert "algorithm has no preset none" in text


def test_a_preset_of_the_whole_brings_its_own_defaults(presets: Path) -> None:
    config = load(source="small")
    assert (config.steps, config.rollout.temperature) == (3, 0.5)
    assert (config.algorithm.clip, config.algorithm.kl) == (0.4, True)


def test_the_keys_of_a_file_lie_over_its_defaults_in_any_order(presets: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "c.yaml", "algorithm: {clip: 0.9}\ndefaults:\n  - small\n  - algorithm: hard\n")
    config = load(source=source)
    assert (config.steps, config.algorithm.mode, config.algorithm.clip, config.algorithm.kl) == (
        3,
        "sum",
        0.9,
        True,
    )


def test_a_preset_on_the_command_line_forgets_what_the_file_set_in_its_section(presets: Path) -> None:
    config = load("algorithm.kl=false", "algorithm=hard", "steps=1", source="small")
    assert (config.algorithm.mode, config.algorithm.clip, config.algorithm.kl) == ("sum", 0.2, False)
    assert (config.steps, config.rollout.temperature) == (1, 0.5)
    assert load("algorithm.clip=0.1", "algorithm=soft", source="small").algorithm.clip == 0.1


def test_presets_that_do_not_exist_name_those_that_do(presets: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm has no preset sofd; it has hard, soft; did you mean soft\?"
    ):
        load("algorithm=sofd")
    with pytest.raises(ConfigError, match="rollout is a section without presets"):
        load("rollout=fast")
    with pytest.raises(ConfigError, match="neither a file nor a preset big; .* the presets are small"):
        load(source="big")
    with pytest.raises(ConfigError, match=r"algorithm has no preset x"):
        load(source=write(tmp_path / "c.yaml", "defaults: [algorithm: x]\n"))


def test_presets_in_a_circle_are_an_error(presets: Path) -> None:
    write(presets / "one.yaml", "defaults: [two]\n")
    write(presets / "two.yaml", "defaults: [one]\n")
    with pytest.raises(ConfigError, match="preset one -> preset two -> preset one: .* form a circle"):
        load(source="one")


def test_a_preset_named_as_a_value_in_a_file_says_where_it_belongs(presets: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "c.yaml", "algorithm: soft\n")
    with pytest.raises(ConfigError, match=r"list `- algorithm: soft` under defaults"):
        load(source=source)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: [1\n", "line 2, column 1"),
        ("rollout:\n  seed: 1\n temperature: 1\n", "line 3, column 2: the indentation does not fit"),
        ("steps: 1\n seed: 2\n", "line 2, column 6: `key: value` cannot stand here: the indentation"),
        ("rollout:\n\tseed: 1\n", "line 2, column 1: a tab cannot indent: use spaces"),
        ("data: @x\n", "line 1, column 7: a value that begins with @ needs quotes"),
        ("data: [1\nsteps: 2\n", "line 2, column 6: a `]` or a comma is missing before this place"),
        ("data: 'x\n", "a quote that was opened before is not closed"),
        ("steps: 1\nsteps: 2\n", "line 2, column 1: the key 'steps' appears twice"),
        ("- steps\n", "but a configuration is a mapping"),
        ("defaults: small\n", "defaults is 'small', but it needs a list of names"),
        ("defaults: [{override algorithm: x}]\n", "override, optional and @package are not taken"),
        ("defaults: [{algorithm@here: x}]\n", "override, optional and @package are not taken"),
        ("hydra: {run: {dir: x}}\n", "a section hydra, which is about Hydra's own folders"),
        ("steps: ???\n", "steps is ???"),
        ("defaults: [{a: b, c: d}]\n", "defaults has the entry"),
        ("steps: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("reward: {path: '${now}'}\n", "unknown key now"),
    ],
)
def test_a_file_that_cannot_be_used_names_the_place(tmp_path: Path, text: str, message: str) -> None:
    source = write(tmp_path / "my.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load(source=source)
    assert str(source) in str(caught.value)
    assert message in str(caught.value)


def test_files_that_cannot_be_read_are_errors(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"configuration file .*none\.yaml does not exist; give a YAML file"
    ):
        load(source=tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        load(source=tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"steps: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml is not UTF-8 text"):
        load(source=tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match=r"is a directory that has latin\.yaml; give a YAML file"):
        load(source=tmp_path)  # as the folder of a run has its own


def test_an_empty_file_and_an_empty_section_are_the_defaults(tmp_path: Path) -> None:
    assert load("rollout=null") == load()
    assert load(source=write(tmp_path / "a.yaml", "# nothing yet\n")) == load()
    assert load(source=write(tmp_path / "b.yaml", "rollout:\noptim:\n  # lr: 1\n")) == load()


def test_the_numbers_and_words_of_a_file_mean_what_they_say(tmp_path: Path) -> None:
    source = write(tmp_path / "c.yaml", "optim: {lr: 1e-5}\nrollout: {stop: [no, off, 1:30, 2020-01-01]}\n")
    config = load(source=source)
    assert config.optim.lr == 1e-5
    assert config.rollout.stop == ("no", "off", "1:30", "2020-01-01")


def test_configuration_needs_no_torch() -> None:
    code = (
        "import strop.config, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (RolloutSettings, {"temperature": 0.0}, "rollout.temperature is 0.0, but it needs a number above 0: greedy"),
        (RolloutSettings, {"samples_per_prompt": True}, "rollout.samples_per_prompt is true, but it needs a whole"),
        (RolloutSettings, {"stop": ["a"]}, "rollout.stop is ['a'], but it needs list, each entry text"),
        (OptimSettings, {"lr": "0.1"}, "optim.lr is '0.1', but it needs a number"),
        (OptimSettings, {"betas": (0.9,)}, "optim.betas is (0.9,), but it needs list of 2: a number, a number"),
        (OptimSettings, {"max_grad_norm": math.nan}, "but it needs a finite number above 0 or null"),
        (AlgorithmSettings, {"mode": "men"}, "algorithm.mode is 'men', but it needs one of mean, sum, mean-of-means"),
    ],
)  # fmt: skip
def test_a_section_made_in_python_is_checked_alike(
    section: type, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        section(**values)


def test_a_section_made_in_python_takes_whole_numbers_for_numbers() -> None:
    assert OptimSettings(lr=1, max_grad_norm=None).lr == 1
