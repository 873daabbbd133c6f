"""`echo` of /v1/completions: log-probs of prompts, against transformers, and what of it is served."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from gateway_cases import Open, ScriptedEngine, served
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.agents.openai_server.errors import ApiError
from strop.agents.openai_server.prompt_scorer import PromptScorer
from strop.agents.openai_server.scoring import read_scoring
from strop.engines.config import EngineConfig, ModelConfig
from strop.engines.model import load_model

PROMPTS = [[10, 11, 12, 40, 41], [9], [50, 51, 52]]


@pytest.fixture(scope="module")
def scorer(tiny_model: Path) -> PromptScorer:
    return PromptScorer(load_model(ModelConfig(path=str(tiny_model))), EngineConfig(max_tokens_per_device=64))


def posted(opened: Open, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"{opened.address}/v1/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {opened.token}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def asked(model: Path, scorer: PromptScorer | None, *bodies: dict[str, Any]) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = ScriptedEngine(tokenizer, [])
    found, sessions = served(
        engine,
        lambda opened: [posted(opened, body) for body in bodies],
        tokenizer=tokenizer,
        scorer=scorer,
    )
    assert all(not session.sequences() for session in sessions.values()), "scored prompts are no samples"
    return found


def test_log_probs_and_likeliest_tokens_are_those_of_transformers(
    tiny_model: Path, scorer: PromptScorer
) -> None:
    module = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for prompt, found in zip(PROMPTS, scorer.score(PROMPTS), strict=True):
        with torch.no_grad():
            expected = module(torch.tensor([prompt])).logits[0].log_softmax(-1)  # [n, V]
        chosen = [float(expected[place, token]) for place, token in enumerate(prompt[1:])]
        assert found.log_probs == pytest.approx(chosen, abs=2e-6)
        assert list(found.top_ids) == expected.argmax(-1).tolist()
        assert found.top_log_probs == pytest.approx(expected.max(-1).values.tolist(), abs=2e-6)


def test_a_batch_comes_back_in_the_form_that_harnesses_read(tiny_model: Path, scorer: PromptScorer) -> None:
    """As lm-eval asks: the last entry is the token after the prompt, and greedy where the numbers are equal."""
    greedy = [10, *scorer.score([[10]])[0].top_ids]
    prompts = [*PROMPTS, greedy]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1}
    ((status, made),) = asked(tiny_model, scorer, {"model": "any", **body})
    assert status == 200, made
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for prompt, choice, expected in zip(prompts, made["choices"], scorer.score(prompts), strict=True):
        found = choice["logprobs"]
        assert found["tokens"][: len(prompt)] == [tokenizer.decode([token]) for token in prompt]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:-1] == pytest.approx(list(expected.log_probs), abs=1e-5)
        assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(prompt) + 1
        assert choice["text"] == "".join(found["tokens"])
        assert found["text_offset"][-1] == len(choice["text"]) - len(found["tokens"][-1])
        is_top = [
            number == max(top.values())
            for number, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True)
        ]
        assert is_top == [
            *(token == top for token, top in zip(prompt[1:], expected.top_ids[:-1], strict=True)),
            True,
        ]
    assert made["choices"][3]["logprobs"]["token_logprobs"][1] == pytest.approx(
        scorer.score([[10]])[0].top_log_probs[0], abs=1e-5
    )
    assert made["usage"] == {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15}


def test_a_text_is_scored_by_its_tokens(tiny_model: Path, scorer: PromptScorer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer("1 + 1", add_special_tokens=False)["input_ids"]
    ((status, made),) = asked(tiny_model, scorer, {"prompt": "1 + 1", "echo": True, "logprobs": 0})
    assert status == 200, made
    found = made["choices"][0]["logprobs"]
    assert found["token_logprobs"][1:] == pytest.approx(list(scorer.score([ids])[0].log_probs), abs=1e-5)
    assert found["top_logprobs"] is None
    assert made["choices"][0]["text"] == "1 + 1"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"logprobs": None}, "logprobs"),
        ({"logprobs": 5}, "with echo it is 0, or 1"),
        ({"max_tokens": 16}, "continue it without echo"),
        ({"temperature": 1, "max_tokens": 1}, "is the most likely one; use 0"),
        ({"n": 2}, "scored once"),
        ({"stream": True}, "scored once"),
        ({"top_p": 0.5}, "with echo this server knows"),
        ({"prompt": []}, "must be a text"),
        ({"prompt": [[]]}, "or is empty"),
        ({"prompt": [1, "a"]}, "neither a text nor"),
        ({"prompt": [[1], [-1]]}, "neither a text nor"),
        ({"prompt": [[True]]}, "neither a text nor"),
    ],
)
def test_what_is_not_served_with_echo_is_said(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApiError, match=sentence):
        read_scoring({"prompt": [1, 2], "echo": True, "logprobs": 1} | change)
    assert read_scoring({"prompt": [1, 2], "logprobs": 0}) is None


def test_tokens_that_are_none_and_models_elsewhere_are_refused(
    tiny_model: Path, scorer: PromptScorer
) -> None:
    body = {"prompt": [1, 10**6], "echo": True, "logprobs": 1}
    ((status, refused),) = asked(tiny_model, scorer, body)
    assert (status, "has the token 1000000" in refused["error"]["message"]) == (400, True)
    ((status, refused),) = asked(tiny_model, scorer, body | {"prompt": [1] * 500})
    assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
    ((status, refused),) = asked(tiny_model, None, body)
    assert (status, "rollout.engine=native alone" in refused["error"]["message"]) == (400, True)
