"""Images in requests: from the data: URL to the tokens that are trained, inside a run and by itself."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from gateway_cases import TOKENIZER, Open, ScriptedEngine, served
from PIL import Image

from references.tiny_vision import BLUE, GREEN, RED, picture, png, save_tiny_vision
from references.token_passes import log_probs_of
from strop.agents.config import AgentConfig
from strop.agents.openai_server.chat_model import ChatModel
from strop.agents.openai_server.errors import ApiError
from strop.agents.openai_server.messages import Message, read_messages
from strop.agents.openai_server.session import Session
from strop.agents.openai_server.settings import OpenAIAgentConfig
from strop.agents.setup import AgentSetup
from strop.agents.tools.templates import ChatTemplate
from strop.data.config import DataConfig
from strop.data.prompts import PromptDataset
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.multimodal.families import load_media_processor
from strop.engines.multimodal.placeholders import ToolImages
from strop.engines.packing import make_rows
from strop.engines.tokenizer import load_tokenizer
from strop.protocol.trajectory import MediaTokens, media_of
from strop.rollout.config import RolloutConfig
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling, TokenOutput
from strop.workers.episodes import Episode
from strop.workers.player import make_episode_runner

pytestmark = pytest.mark.timeout(60)
WIDE, HIGH = picture(24, 17, RED, BLUE), picture(17, 33, GREEN, RED)
AGENT = """
import openai

def look_twice(base_url, api_key, row):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = list(row["prompt"])
    first = client.chat.completions.create(model="any", messages=messages, max_tokens=4).choices[0].message
    again = [messages[0]["content"][0], {"type": "text", "text": "And now?"}]
    messages += [first, {"role": "user", "content": again}]
    client.chat.completions.create(model="any", messages=messages, max_tokens=4)
    return 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision("qwen2_vl", tmp_path_factory.mktemp("vision") / "model")


def url(image: Image.Image) -> dict[str, Any]:
    data = base64.b64encode(png(image)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def session_of(folder: Path) -> Session:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    processor = load_media_processor(folder)
    assert processor is not None
    stops = (tokenizer.eos_token_id,)
    return Session(
        ChatModel("m", tokenizer, ChatTemplate(tokenizer), stops, ToolImages(processor)), uid="one"
    )


def test_log_probs_of_an_episode_with_images_are_those_of_the_trainer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    config = ModelConfig(path=str(folder), dtype="float32")
    model, tokenizer = load_model(config, device="cpu"), load_tokenizer(config)
    openai_agent = OpenAIAgentConfig(path=f"{tmp_path / 'agent.py'}:look_twice")
    setup = AgentSetup(AgentConfig(default_agent="openai_agent", openai=openai_agent), tokenizer)
    row = {
        "prompt": [{"role": "user", "content": "<image>see"}], "data_source": "exact", "answer": "x",
        "agent_name": "openai_agent", "images": [png(WIDE)],
    }  # fmt: skip
    prompt = PromptDataset([row], tokenizer, DataConfig(ground_truth_key="answer"), "train").prompt(0, "e0-0")
    sampling = Sampling(key=0, max_tokens=200, stop_token_ids=(tokenizer.eos_token_id,))

    async def whole() -> Episode:
        engine = NativeEngine(model, max_running=4)
        player = make_episode_runner(
            engine,
            model.media,
            None,
            model=ModelConfig(),
            setup=setup,
            rollout=RolloutConfig(timeout_s=60),
            seed=0,
        )
        try:
            return await player.run_episode(prompt, 0, sampling)
        finally:
            player.close()
            await engine.close()

    sequences = asyncio.run(whole()).sequences
    assert sequences[0].prompt_ids == prompt.token_ids
    assert [one.parts for one in sequences[-1].media] == [(png(WIDE),)] * 2
    rows = make_rows(
        [torch.tensor(one.prompt_ids) for one in sequences],
        [torch.tensor(one.response_ids) for one in sequences],
        [one.media for one in sequences],
    )
    trained, _ = log_probs_of(model, rows, temperature=1.0)
    mask = torch.tensor([value for one in sequences for value in one.sampled])
    recorded = torch.tensor([value for one in sequences for value in one.log_probs])
    assert 2 <= int(mask.sum()) <= 8, "two answers of up to four tokens"
    assert float((trained - recorded)[mask].abs().max()) < 1e-4


def test_images_stand_where_the_message_has_them(folder: Path) -> None:
    session = session_of(folder)
    content = [{"type": "text", "text": "a"}, url(WIDE), {"type": "text", "text": "b"}, url(HIGH)]
    ids = session.chat_ids(read_messages([{"role": "user", "content": content}]), ())
    before = session.model.template.encode("<|user|>a")
    wide, high = media_of(ids)
    assert (wide.size, high.size) == ((24, 17), (17, 33))
    assert wide.start == len(before) + 1, "behind the token that opens an image"
    assert high.start == wide.start + wide.num_tokens + 3, (
        "an end, the letter b, and a start are between them"
    )
    assert list(ids[: len(before)]) == before


def test_another_image_of_the_same_size_begins_another_sequence(folder: Path) -> None:
    session = session_of(folder)
    output = TokenOutput(token_ids=(20,), log_probs=(-0.5,), versions=(0,), stop_reason="stop")
    for image in (WIDE, picture(24, 17, GREEN)):
        ids = session.chat_ids(read_messages([{"role": "user", "content": [url(image)]}]), ())
        session.record(ids, output, message=Message("assistant", "a"))
    later = session.chat_ids(read_messages([{"role": "user", "content": [url(picture(24, 17, BLUE))]}]), ())
    session.record(MediaTokens((*later, 20), media_of(later)), output, message=Message("assistant", "b"))
    assert [one.media[0].parts for one in session.sequences()] == [
        (png(WIDE),), (png(picture(24, 17, GREEN)),), (png(picture(24, 17, BLUE)),),
    ]  # fmt: skip


def test_images_that_cannot_be_shown_are_refused(folder: Path) -> None:
    def asked(part: Any, role: str = "user") -> Any:
        return [{"role": role, "content": [part]}]

    for part, expected in (
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,***"}}, "no base64"),
        ({"type": "image_url"}, "nothing is fetched"),
    ):
        with pytest.raises(ApiError, match=expected):
            read_messages(asked(part))
    with pytest.raises(ApiError, match="takes text here"):
        read_messages(asked(url(WIDE), role="system"))
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    with pytest.raises(ApiError, match="messages: "):
        session_of(folder).chat_ids(read_messages(asked(broken)), ())


def test_a_model_of_text_says_so() -> None:
    def work(opened: Open) -> str:
        messages: Any = [{"role": "user", "content": [url(WIDE)]}]
        with pytest.raises(openai.BadRequestError) as refused:
            opened.client().chat.completions.create(model="any", messages=messages)
        return str(refused.value)

    said, _ = served(ScriptedEngine(TOKENIZER, ["a<|im_end|>"]), work)
    assert "the model takes text alone" in said
