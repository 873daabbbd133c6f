"""A misspelt argument of a function that users call is answered with the nearest one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import strop


@pytest.mark.parametrize(
    ("call", "arguments", "sentence"),
    [
        ("train", {"reward": None}, r"train\(\) has no argument 'reward'; did you mean 'rewards'\?"),
        ("train", {"on_stepp": None}, r"did you mean 'on_step'\?"),
        ("sft", {"val_dat": None}, r"sft\(\) has no argument 'val_dat'; did you mean 'val_data'\?"),
        ("GRPO", {"stepz": 3}, r"GRPO\(\) has no argument 'stepz'; did you mean 'steps'\?"),
        ("GRPO", {"samples": 8}, r"did you mean 'samples_per_prompt'\?"),
        ("GRPO", {"num_generations": 8}, r"did you mean 'samples_per_prompt'\?"),
        ("GRPO", {"zzzz": 8}, r"it has samples_per_prompt, prompts_per_step"),
    ],
)
def test_the_nearest_argument_is_named(call: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        getattr(strop, call)(**arguments)


def test_known_arguments_are_taken_and_shown() -> None:
    assert strop.GRPO(steps=3).settings() == {"trainer.max_steps": 3}
    assert "rewards" in inspect.signature(strop.train).parameters
