from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_settings import (
    AlgorithmSettings,
    DataSettings,
    OptimSettings,
    RewardSettings,
    RolloutSettings,
    Settings,
    ToolSettings,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config import ConfigError, describe, load_config, read_config, save_config, to_dict, to_flat_dict
from strop.config.sections import section
from strop.config.yaml_text import dump, parse

FLOATS = st.floats(allow_nan=False)
# Words that some YAML reader takes for something else than text.
WORDS = st.sampled_from(
    [
        "no",
        "on",
        "~",
        "null",
        "1e-5",
        "1_0",
        ".5",
        "010",
        "0x1F",
        "1:30",
        "2020-01-01",
        "=",
        "<<",
        "._",
        "- a",
        "a: b",
        "many words " * 20,
        "line\nline\n",
        "next\x85line",
    ]
)
TEXTS = st.one_of(st.text(max_size=12), WORDS)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), FLOATS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
TREES = st.builds(
    Settings,
    data=st.builds(DataSettings, train_files=st.lists(TEXTS, max_size=3).map(tuple), shuffle=st.booleans()),
    rollout=st.builds(
        RolloutSettings,
        temperature=st.floats(min_value=1e-6),
        stop=st.lists(TEXTS, max_size=2).map(tuple),
        seed=st.one_of(st.integers(), TEXTS),
    ),
    optim=st.builds(
        OptimSettings,
        lr=FLOATS,
        betas=st.tuples(FLOATS, FLOATS),
        max_grad_norm=st.none() | st.floats(1e-6, 1e6),
    ),
    algorithm=st.builds(AlgorithmSettings, mode=st.sampled_from(["mean", "sum", "mean-of-means"])),
    reward=st.builds(
        RewardSettings,
        path=TEXTS,
        kwargs=st.dictionaries(TEXTS, PLAIN, max_size=3),
        weights=st.dictionaries(TEXTS, st.floats(0, 1), max_size=2),
    ),
    tools=st.lists(st.builds(ToolSettings, name=TEXTS), max_size=2).map(tuple),
    steps=st.integers(),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@settings(max_examples=60, deadline=None)
@given(config=TREES)
def test_a_saved_configuration_reads_back_equal(folder: Path, config: Settings) -> None:
    save_config(config, folder / "config.yaml")
    assert read_config(Settings, folder / "config.yaml") == config
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


@settings(max_examples=100, deadline=None)
@given(value=PLAIN)
def test_yaml_text_reads_back_equal_here_and_in_pyyaml(value: Any) -> None:
    text = dump(value)
    assert repr(parse(text, "text")) == repr(value)
    assert repr(yaml.safe_load(text)) == repr(value)


def test_the_plain_form_holds_each_field() -> None:
    config = Settings(data=DataSettings(train_files=("a",)), tools=(ToolSettings(name="calc"),))
    plain = to_dict(config)
    assert plain["data"] == {"train_files": ["a"], "prompts_per_step": 4, "shuffle": True}
    assert plain["tools"] == [{"name": "calc", "limit": 1}]
    flat = to_flat_dict(config)
    assert (flat["data.train_files"], flat["reward.kwargs"]) == (["a"], {"strict": True})
    assert list(plain) == ["data", "rollout", "optim", "algorithm", "reward", "tools", "steps"]


def test_what_a_file_cannot_hold_names_its_key(tmp_path: Path) -> None:
    config = Settings(data=DataSettings(train_files=()), reward=RewardSettings(kwargs={"where": [Path("x")]}))
    with pytest.raises(ConfigError, match=r"reward\.kwargs\.where\[0\] holds a PosixPath"):
        save_config(config, tmp_path / "config.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_saved_file_of_another_tree_names_its_unknown_keys(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "data: {train_files: []}\nrollout: {temperatur: 1.0}\n", encoding="utf-8"
    )
    with pytest.raises(
        ConfigError, match=r"unknown key rollout\.temperatur \(in .*config\.yaml, line 2\); the nearest"
    ):
        read_config(Settings, tmp_path / "config.yaml")


def test_describe_gives_each_key_with_the_text_under_its_field() -> None:
    docs = {doc.key: doc for doc in describe(Settings)}
    assert docs["rollout.temperature"].doc == "Sampling temperature."
    assert docs["optim.betas"].doc == "Averaging of gradient and square."
    assert docs["optim.undocumented"].doc == ""
    assert (docs["optim.lr"].type, docs["optim.lr"].default) == ("a number", 0.5)
    assert docs["data.train_files"].default == []
    assert docs["rollout.temperature"].type == "a number above 0"
    assert docs["optim.max_grad_norm"].type == "a finite number above 0 or null"
    assert docs["reward.weights"].type == "mapping of names to a number of at least 0 and at most 1"
    assert docs["algorithm.mode"].type == "one of mean, sum, mean-of-means"
    assert "rollout" not in docs


def test_inherited_fields_keep_their_text() -> None:
    assert {doc.key: doc.doc for doc in describe(Child)} == {"first": "The first.", "second": "The second."}


def test_a_type_that_no_file_can_hold_is_a_fault_of_the_class() -> None:
    with pytest.raises(ValueError, match=r"unfit\.when is set\(\), but it needs set\[int\]"):
        load_config(Unfit)


@dataclass(frozen=True, kw_only=True)
class Parent:
    first: int = 1
    """The first."""


@dataclass(frozen=True, kw_only=True)
class Child(Parent):
    second: int = 2
    """The second."""


@section("unfit")
class Unfit:
    when: set[int] = field(default_factory=set)
