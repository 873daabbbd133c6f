"""Answers that end at a token of their own, such as </search>: it stays, and the turn is ended behind it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from agent_cases import ScriptedModel, play, prompt_of
from template_family import family_tokenizer
from tokenizers import AddedToken

from strop.agents.config import AgentConfig
from strop.agents.envs.config import EnvironmentConfig
from strop.agents.setup import AgentSetup
from strop.agents.tools import templates
from strop.rollout.types import Sampling
from strop.utils.chat_template.answers import keep_special_tokens, special_tokens

ENVIRONMENT = """
class Search:
    def reset(self, seed, row):
        self.num_steps = 0
        return ""

    def step(self, action):
        self.num_steps += 1
        return "found: 3", 0.0, self.num_steps == 2, {"said": action}
"""


@pytest.mark.parametrize("is_special", [False, True])
def test_the_token_is_part_of_the_answer_and_the_turn_is_ended_behind_it(
    tmp_path: Path, is_special: bool
) -> None:
    file = tmp_path / "search.py"
    file.write_text(ENVIRONMENT)
    tokenizer = copy.deepcopy(family_tokenizer("qwen25"))
    tokenizer.add_tokens([AddedToken(name, special=is_special) for name in ("<search>", "</search>")])
    keep_special_tokens(tokenizer, None)  # found anew, with these
    stop, end = (tokenizer.convert_tokens_to_ids(name) for name in ("</search>", "<|im_end|>"))
    said = tokenizer("<search>how much</search>", add_special_tokens=False)["input_ids"]
    assert said[-1] == stop
    config = AgentConfig(default_agent="env_agent", environment=EnvironmentConfig(name=f"{file}:Search"))
    sampling = Sampling(key=0, max_tokens=500, stop_token_ids=(end, stop))
    model = ScriptedModel([said])
    prompt = prompt_of(tokenizer, agent_name="env_agent")
    sequences = play(prompt, model, AgentSetup(config, tokenizer), sampling=sampling)
    (sequence,) = sequences
    first, second = (ids for ids, _ in model.requests)
    assert second[: len(first) + len(said) + 1] == (*first, *said, end)
    assert tokenizer.decode(second[len(first) :]) == (
        "<search>how much</search><|im_end|>\n<|im_start|>user\nfound: 3<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sum(sequence.sampled) == 2 * len(said)
    assert sequence.extra["reward_parts"]["said"] == "<search>how much</search>"


def test_the_tokens_that_may_end_a_turn_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[object] = []

    def look_up(tokenizer: Any) -> dict[str, int]:
        looked_up.append(tokenizer)
        return special_tokens(tokenizer)

    monkeypatch.setattr(templates, "special_tokens", look_up)
    tokenizer = family_tokenizer("qwen25")
    template = templates.ChatTemplate(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert template.ends_of_turns((end, 0)) == template.ends_of_turns([end]) == {end}
    assert len(looked_up) == 1
