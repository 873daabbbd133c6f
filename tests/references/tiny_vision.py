"""Tiny vision-language models with random weights, as ordinary Hugging Face folders, and pictures to show them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    GenerationConfig,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from strop.data.tiny_model import END_OF_TURN, PAD, make_tiny_tokenizer

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "qwen3_5")
IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
PATCH, MERGE = 4, 2
"""Pixels along a patch, patches along a token: a token is 8 x 8 pixels."""

TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|' + message['role'] + '|>' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part['type'] == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- else -%}{{- part['text'] -}}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of characters, with tokens for media and a template that places them."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END, IMAGE, VIDEO]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_tiny_vision(
    kind: str, folder: Path, *, seed: int = 0, spread: float = 0.15, head_dim: int = 16
) -> Path:
    """Write model, tokenizer and image processor of one of KINDS; `spread` is that of its random weights."""
    tokenizer = vision_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(kind, tokenizer, head_dim)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=spread)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    per_frame = 2 if kind == "glm4v" else 1
    processor = (Glm4vImageProcessorPil if kind == "glm4v" else Qwen2VLImageProcessorPil)(
        size={"shortest_edge": per_frame * 16 * 16, "longest_edge": per_frame * 64 * 64},
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
    )
    processor.save_pretrained(folder)
    return folder


def _model(kind: str, tokenizer: PreTrainedTokenizerFast, head_dim: int) -> Any:
    scale = head_dim // 16
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 2 * head_dim,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2 * scale, 3 * scale, 3 * scale],
            "rope_theta": 10000.0,
        },
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END_OF_TURN),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
    }
    shared = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image_token_id", IMAGE),
            ("video_token_id", VIDEO),
            ("vision_start_token_id", START),
            ("vision_end_token_id", END),
        )
    }
    vision: dict[str, Any] = {
        "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2,
    }  # fmt: skip
    both = {**shared, "tie_word_embeddings": True}
    if kind == "qwen2_vl":
        tower = {**vision, "depth": 1, "embed_dim": 16, "hidden_size": 2 * head_dim, "mlp_ratio": 2}
        return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=tower, **both))
    wide = {**vision, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 2 * head_dim, "depth": 2}
    if kind == "qwen2_5_vl":
        tower = {**wide, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        return Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=tower, **both)
        )
    if kind == "glm4v":
        rope = {
            **text["rope_parameters"],
            "mrope_section": [2 * scale, scale, scale],
            "partial_rotary_factor": 0.5,
        }
        media = {"image_start_token_id": shared["vision_start_token_id"], "video_start_token_id": 98}
        media |= {"image_end_token_id": shared["vision_end_token_id"], "video_end_token_id": 99}
        tower = {**wide, "image_size": 32}
        return Glm4vForConditionalGeneration(
            Glm4vConfig(
                text_config={**text, "rope_parameters": rope}, vision_config=tower, **{**both, **media}
            )
        )
    if kind == "qwen3_5":
        delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
        delta |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
        rope = {**text["rope_parameters"], "partial_rotary_factor": 1.0}
        return Qwen3_5ForConditionalGeneration(
            Qwen3_5Config(
                text_config={**text, **delta, "head_dim": head_dim, "rope_parameters": rope},
                vision_config={**wide, "num_position_embeddings": 16},
                **both,
            )
        )
    tower = {**wide, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    text["rope_parameters"]["mrope_interleaved"] = True  # as the published folders say it; vLLM reads it
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config={**text, "head_dim": head_dim}, vision_config=tower, **both)
    )


def picture(width: int, height: int, *colors: tuple[int, int, int]) -> Image.Image:
    """Vertical stripes of these colours."""
    image = Image.new("RGB", (width, height), colors[0])
    for number, color in enumerate(colors):
        image.paste(color, (number * width // len(colors), 0, width, height))
    return image


def png(image: Image.Image) -> bytes:
    """The picture as a PNG file."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


RED, GREEN, BLUE = (220, 20, 20), (20, 200, 40), (20, 40, 220)
