"""Settings that a run may be continued with: what every sentence of the program names, and what the page lists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import strop
from strop.config import ConfigError, describe, load_config, save_config
from strop.trainer.config import Config
from strop.trainer.resume_overrides import (
    NEUTRAL,
    STEERING,
    changeable_keys,
    is_changeable,
    settings_to_continue,
)

PACKAGE = Path(strop.__file__).parent
KEYS = {doc.key for doc in describe(Config)}
REMEDIES = [
    "run.save_samples=false",
    "run.async_save=true",
    "resources.call_timeout_s=9",
    "resources.start_timeout_s=9",
    "trainer.trackers=[jsonl]",
    "trainer.preflight=false",
    "rollout.timeout_s=9",
    "agent.timeout_s=9",
    "reward.timeout_s=9",
    "reward.start_timeout_s=9",
    "reward.max_failed_share=1",
    "reward.max_memory_gib=null",
    "reward.num_workers=1",
    "reward.judge.max_cost=null",
    "reward.judge.timeout_s=9",
    "reward.server.timeout_s=9",
    "reward.sandbox.queue_s=9",
    "algorithm.filter_groups.max_rounds=99",
    "algorithm.filter_groups.at_limit=stop",
    "actor.engine.max_tokens_per_device=5000",
    "reward_model.truncation=right",
    "~reward.timeout_s",
]
"""What sentences that end a run, or warn in one, say to set."""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    overrides = [
        "reward.judge={base_url: 'http://127.0.0.1:9/v1', model: m, max_cost: 1, price_per_million_output_tokens: 1}",
        "reward.server.url='http://127.0.0.1:9/score'",
        "reward.timeout_s=5",
        "algorithm.filter_groups.enable=true",
        "trainer.max_steps=5",
    ]
    save_config(load_config(Config, overrides=overrides), tmp_path / "config.yaml")
    return tmp_path / "config.yaml"


def continued(file: Path, overrides: list[str]) -> dict[str, Any]:
    return dict(settings_to_continue(file, overrides, text=file.read_text()).after)


@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_remedy_of_a_sentence_may_be_given(config_file: Path, remedy: str) -> None:
    changed = continued(config_file, [remedy])
    assert list(changed) == [remedy.lstrip("~").split("=")[0]]


@pytest.mark.parametrize(
    "override",
    [
        "trainer.seed=1",
        "reward.judge.model=other",
        "actor.optim.name=muon",
        "algorithm.norm_adv_by_std=false",
        "reward.sandbox.limits.wall_s=1",
        "data={max_prompt_tokens: 9}",
    ],
)
def test_what_makes_another_run_is_refused(config_file: Path, override: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"would make it another one, which --resume cannot: .*May be given anew: how long it trains",
    ):
        continued(config_file, ["run.save_samples=false", override])


def test_a_value_that_is_the_runs_own_is_no_change(config_file: Path) -> None:
    assert continued(config_file, ["trainer.seed=0"]) == {}


def test_every_listed_key_exists_and_stands_on_the_page() -> None:
    page = (PACKAGE.parent / "docs" / "run-folder.md").read_text(encoding="utf-8")
    for about, keys in {**NEUTRAL, **STEERING}.items():
        assert about in page.lower()
        for key in keys:
            assert f"`{key}…`" in page if key.endswith(".") else f"`{key}`" in page
            assert any(known.startswith(key) if key.endswith(".") else known == key for known in KEYS)


def test_sentences_that_speak_of_resume_name_no_setting_that_is_refused() -> None:
    seen = set()
    for file in PACKAGE.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "--resume" in source else ():
            text = _text(node)
            if "--resume" in text:
                seen |= {key for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", text) if key in KEYS}
    assert {"run.save_samples", "reward.judge.max_cost"} <= seen
    assert [key for key in seen if not is_changeable(key)] == []
    assert "reward.judge.max_cost" in changeable_keys()


def _text(node: ast.AST) -> str:
    """Of a string that is no docstring, also of one with values in it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
    return (
        node.value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
        else ""
    )
