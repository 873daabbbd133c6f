"""The nearest of some names, in which a dot parts nothing, and the nearest of some keys, in which it does."""

from __future__ import annotations

import pytest

from strop.config.unknown_key import unknown_key
from strop.utils.field_types import nearest


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        (
            "Qwen/Qwen2.5-0.6B",
            ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-72B"],
            "Qwen/Qwen2.5-0.5B",
        ),
        ("v1.3", ["v1.2", "main"], "v1.2"),
        ("v1.0.1", ["v1.0.0"], "v1.0.0"),
        ("Qwen3-0.8B", ["Qwen3-0.6B"], "Qwen3-0.6B"),
        ("SmolLM2-1.7B", ["SmolLM2-1.7B-Instruct", "SmolLM2"], "SmolLM2-1.7B-Instruct"),
        ("main", ["trunk"], None),
    ],
)
def test_the_nearest_name(name: str, names: list[str], expected: str | None) -> None:
    assert nearest(name, names) == expected


@pytest.mark.parametrize(
    ("key", "keys", "expected"),
    [
        ("critic.lr", ["actor.optim.lr", "critic.optim.lr"], "critic.optim.lr"),
        ("actor.optim.rl", ["reward.server.url", "actor.optim.lr", "actor.optim.name"], "actor.optim.lr"),
        ("run.keep", ["algorithm.keep", "run.keep_last"], "run.keep_last"),
        ("model.model_path", ["model", "model.path"], "model.path"),
    ],
)
def test_the_nearest_key(key: str, keys: list[str], expected: str) -> None:
    assert unknown_key(keys, key) == f"unknown key {key}; the nearest valid key is {expected}"
