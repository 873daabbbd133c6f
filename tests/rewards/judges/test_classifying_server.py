"""A real reward model behind /classify: it reads the conversation in its own chat template, whoever renders it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_cases import Handler, serve
from reward_cases import make_prompt, score_all
from tokenizers import AddedToken, Tokenizer, models, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from strop.protocol.trajectory import Prompt
from strop.rewards import RewardConfig, RewardError, RewardPool
from strop.rewards.config import OnFailureConfig
from strop.rewards.judges.config import ServerConfig

pytestmark = pytest.mark.timeout(60)

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
QUESTION = replace(
    make_prompt(),
    messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "7 + 5 = ?"}),
)
ANSWERS = ["12", "11", "twelve"]


def make_tokenizer(*, sets_bos: bool) -> PreTrainedTokenizerFast:
    """Characters; with a first token that the tokenizer puts before every text, or leaves to the template."""
    names = ["<s>", *(chr(code) for code in range(0x20, 0x7F))]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    if sets_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<s>")
    fast.chat_template = TEMPLATE
    return fast


@dataclass
class Classifier:
    """A server as vLLM's: it renders messages itself, and encodes texts with the tokens that its tokenizer sets."""

    model: Any
    tokenizer: PreTrainedTokenizerBase

    def score(self, ids: list[int]) -> float:
        with torch.inference_mode():
            return float(self.model(torch.tensor([ids])).logits[0, 0])

    def __call__(self, handler: Handler, body: dict[str, Any], _number: int) -> None:
        if "messages" in body:
            assert body["add_generation_prompt"] is False
            text = self.tokenizer.apply_chat_template(body["messages"], tokenize=False)
            encoded = [self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        else:
            encoded = [self.tokenizer(text)["input_ids"] for text in body["input"]]
        scores = [self.score(ids) for ids in encoded]
        if body.get("use_activation", True):
            scores = [float(torch.tensor(score).sigmoid()) for score in scores]
        handler.send({"data": [{"index": i, "probs": [score]} for i, score in enumerate(scores)]})


@pytest.fixture(scope="module")
def classifier(tiny_model: Path) -> Callable[[bool], Classifier]:
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, pad_token_id=0)
    model = model.float().eval()
    model.score.weight.data *= 40  # differences that rounding cannot hide
    return lambda sets_bos: Classifier(model, make_tokenizer(sets_bos=sets_bos))


def expected(classifier: Classifier, answer: str) -> float:
    """The model's number for the conversation, worked out without any server."""
    text = f"[system]be brief[user]7 + 5 = ?[assistant]{answer}"
    return classifier.score([0, *(1 + ord(character) - 0x20 for character in text)])


@pytest.mark.parametrize("renders_here", [True, False])
def test_an_answer_that_continues_a_message_is_read_as_one_with_it(
    classifier: Callable[[bool], Classifier], tmp_path: Path, renders_here: bool
) -> None:
    one = classifier(True)
    one.tokenizer.save_pretrained(tmp_path / "tokenizer")
    fields: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer")} if renders_here else {}
    begun = replace(QUESTION, messages=(*QUESTION.messages, {"role": "assistant", "content": "1"}))
    with serve(one) as service:
        config = ServerConfig(url=f"{service.url}/classify", format="classify", **fields)
        (outcome,) = score_all(RewardConfig(server=config), ["2"], begun)
    assert outcome.score == pytest.approx(expected(one, "12"), abs=1e-4)


@pytest.mark.parametrize("sets_bos", [True, False])
@pytest.mark.parametrize("renders_here", [True, False])
def test_the_reward_is_what_the_model_says_of_the_conversation_in_its_template(
    classifier: Callable[[bool], Classifier], tmp_path: Path, sets_bos: bool, renders_here: bool
) -> None:
    one = classifier(sets_bos)
    one.tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path / "tokenizer")("")["input_ids"] == ([0] if sets_bos else [])
    fields: dict[str, Any] = (
        {"tokenizer": str(tmp_path / "tokenizer"), "batch_size": 3} if renders_here else {}
    )
    with serve(one) as service:
        config = ServerConfig(url=f"{service.url}/classify", format="classify", **fields)
        outcomes = score_all(RewardConfig(server=config), ANSWERS, QUESTION)
    wanted = [expected(one, answer) for answer in ANSWERS]
    assert [outcome.score for outcome in outcomes] == pytest.approx(wanted, abs=1e-4)
    assert len({round(score, 3) for score in wanted}) == 3
    assert len(service.requests) == (1 if renders_here else 3)


def test_probabilities_can_be_asked_for(classifier: Callable[[bool], Classifier]) -> None:
    one = classifier(False)
    with serve(one) as service:
        config = ServerConfig(url=service.url, format="classify", use_activation=True)
        (outcome,) = score_all(RewardConfig(server=config), ["12"], QUESTION)
    assert outcome.score == pytest.approx(float(torch.tensor(expected(one, "12")).sigmoid()), abs=1e-5)


def test_a_conversation_that_the_template_refuses_fails_alone(
    classifier: Callable[[bool], Classifier], tmp_path: Path
) -> None:
    one = classifier(False)
    one.tokenizer.save_pretrained(tmp_path)
    tools: Prompt = replace(QUESTION, messages=(*QUESTION.messages, {"role": "tool", "content": "12"}))

    async def both() -> list[Any]:
        async with RewardPool(config) as pool:
            return list(await asyncio.gather(pool.score_text(QUESTION, "12"), pool.score_text(tools, "12")))

    with serve(one) as service:
        config = RewardConfig(
            server=ServerConfig(url=service.url, format="classify", tokenizer=str(tmp_path)),
            on_failure=OnFailureConfig(error="exclude"),
        )
        good, refused = asyncio.run(both())
    assert good.score == pytest.approx(expected(one, "12"), abs=1e-4)
    assert (refused.kind, refused.score) == ("error", None)
    assert "refuses this conversation (no tools)" in refused.error


def test_a_tokenizer_that_cannot_render_is_said_before_anything_is_asked(tmp_path: Path) -> None:
    plain = make_tokenizer(sets_bos=False)
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    for folder, sentence in (
        (tmp_path / "nowhere", "reward.server.tokenizer is .*nowhere.*, which cannot be loaded"),
        (tmp_path / "plain", "has no chat template, so conversations cannot become text"),
    ):
        config = ServerConfig(url="http://127.0.0.1:9", format="classify", tokenizer=str(folder))
        with pytest.raises(RewardError, match=sentence):
            score_all(RewardConfig(server=config), ["12"])
