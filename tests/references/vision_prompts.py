"""Prompts with images and videos for tiny models, as rows make them, and what transformers says to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from references.tiny_vision import BLUE, GREEN, RED, picture, png
from references.videos import UNEVEN, write_video
from strop.data.config import DataConfig
from strop.data.prompts import PromptDataset
from strop.engines.config import ModelConfig
from strop.engines.multimodal.families import load_media_processor
from strop.engines.tokenizer import load_tokenizer
from strop.protocol.trajectory import MediaTokens, Prompt
from strop.rollout.types import Sampling

WIDE, HIGH, GREENS = picture(24, 17, RED, BLUE), picture(17, 33, GREEN, RED), picture(24, 17, GREEN)


def prompts_of(path: Path, *, videos: bool = False) -> list[Prompt]:
    """Prompts with an image, with the same tokens and another image, with two, of text, and with videos."""
    contents: list[tuple[str, dict[str, Any]]] = [
        ("a<image>b", {"images": [png(WIDE)]}),
        ("a<image>b", {"images": [png(GREENS)]}),
        ("<image>x<image>", {"images": [png(HIGH), png(WIDE)]}),
        ("plain", {}),
    ]
    if videos:
        film = str(write_video(path.with_suffix(".mp4"), UNEVEN))
        contents += [
            ("<video>?<image>", {"videos": [[png(WIDE), png(GREENS), png(WIDE)]], "images": [png(HIGH)]}),
            ("a<video>b<video>", {"videos": [{"video": film, "fps": 3}, film]}),
        ]
    return prompts_from(path, contents)


def prompts_from(path: Path, contents: list[tuple[str, dict[str, Any]]]) -> list[Prompt]:
    """Prompts of these texts and columns of media, for the model of a folder."""
    rows = [
        {"prompt": [{"role": "user", "content": text}], "data_source": "exact", "answer": "x", **media}
        for text, media in contents
    ]
    tokenizer = load_tokenizer(ModelConfig(path=str(path)))
    dataset = PromptDataset(rows, tokenizer, DataConfig(ground_truth_key="answer"), "train")
    return [dataset.prompt(row, f"e0-{row:06d}") for row in dataset.row_numbers]


def asked(prompt: Prompt, **options: Any) -> tuple[Any, Sampling]:
    """What an engine is asked: the prompt, and greedy decoding unless said otherwise."""
    token_ids: Any = MediaTokens(prompt.token_ids, prompt.media) if prompt.media else prompt.token_ids
    return token_ids, Sampling(**{"key": 0, "temperature": 0.0, "max_tokens": 12, **options})


def generated_by_transformers(path: Path, prompt: Prompt, count: int) -> list[int]:
    """Greedy answers of the model's own `generate`, without media tokens."""
    processor = load_media_processor(path)
    assert processor is not None
    module: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([prompt.token_ids])
    types = torch.zeros_like(ids, dtype=torch.int32)
    arguments: dict[str, Any] = {}
    for number, (kind, name) in enumerate(
        [("image", "pixel_values"), ("video", "pixel_values_videos")], start=1
    ):
        own = [one for one in prompt.media if one.kind == kind]
        if own:
            types[ids == processor.token_ids[kind]] = number
            arguments[name] = torch.cat([processor.pixels(one) for one in own])
            arguments[f"{kind}_grid_thw"] = torch.tensor([one.grid for one in own])
    if arguments:
        arguments["mm_token_type_ids"] = types
    if module.config.model_type == "qwen2_5_vl" and "video_grid_thw" in arguments:
        seconds = [one.seconds_per_patch for one in prompt.media if one.kind == "video"]
        arguments["second_per_grid_ts"] = torch.tensor(seconds)
    out = module.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        suppress_tokens=sorted(processor.token_ids.values()),
        **arguments,
    )
    return [int(token) for token in out[0, len(prompt.token_ids) :]]
