"""Tiny models with images whose positions are those of text, as ordinary Hugging Face folders: those that read them as
tiles (Gemma 3, InternVL, Llama 4), and Kimi K2.5. And what the classes of transformers make of their prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    GenerationConfig,
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4Processor,
    PreTrainedTokenizerFast,
)

from references.tiny_vision import TEMPLATE
from strop.data.tiny_model import END_OF_TURN, PAD, make_tiny_tokenizer
from strop.engines.multimodal.families import load_media_processor
from strop.protocol.trajectory import Media

TILED = ("gemma3", "internvl", "llama4")
ONE_AXIS = (*TILED, "kimi_k25")
EVERY_RUN = [
    "gemma3",
    "llama4",
    pytest.param("internvl", marks=pytest.mark.slow),
    pytest.param("kimi_k25", marks=pytest.mark.slow),
]
"""ONE_AXIS, those that every run of the tests compares first: blocks; chunks, experts, separators of tiles."""
TOKENS = {
    "gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    "internvl": ("<img>", "</img>", "<IMG_CONTEXT>"),
    "kimi_k25": ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"),
    "llama4": (
        "<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|patch|>",
    ),
}  # fmt: skip
"""Control tokens of each; the last one stands for a part of an image."""
WRITTEN = {
    "gemma3": "<start_of_image>",
    "internvl": "<IMG_CONTEXT>",
    "llama4": "<|image|>",
    "kimi_k25": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
}
"""What a chat template writes for an image."""
SIDE = {"gemma3": 24, "internvl": 16, "llama4": 16}
"""Pixels along a tile."""
MAX_TILES = 4
PER_TILE = {"gemma3": 9, "internvl": 4, "llama4": 4}
MAX_PATCHES = 24
"""Of an image of Kimi K2.5, of 4 x 4 pixels each."""


def tiles_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """The tokenizer of characters, with the control tokens of a family and a template that places images."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS[kind])})
    written = "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = TEMPLATE.replace(written, WRITTEN[kind])
    return tokenizer


def save_tiny_tiles(kind: str, folder: Path, *, seed: int = 0, spread: float = 0.15) -> Path:
    """Write model, tokenizer and image processor of one of ONE_AXIS; `spread` is that of its random weights."""
    tokenizer = tiles_tokenizer(kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(kind, tokenizer)
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
    size = {"height": SIDE.get(kind, 0), "width": SIDE.get(kind, 0)}
    if kind == "kimi_k25":  # its class needs torchvision, and so does that of Llama 4
        settings = {
            "image_processor_type": "Kimi_K25ImageProcessor",
            "patch_size": 4,
            "max_patches": MAX_PATCHES,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    elif kind == "gemma3":
        Gemma3ImageProcessorPil(size=size).save_pretrained(folder)
    elif kind == "internvl":
        GotOcr2ImageProcessorPil(size=size, max_patches=MAX_TILES).save_pretrained(folder)
    else:
        settings = {"image_processor_type": "Llama4ImageProcessor", "size": size, "max_patches": MAX_TILES}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def _model(kind: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (*TOKENS[kind], END_OF_TURN, PAD)}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": ids[END_OF_TURN], "pad_token_id": ids[PAD],
    }  # fmt: skip
    vision: dict[str, Any] = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    }  # fmt: skip
    image = ids[TOKENS[kind][-1]]
    if kind == "kimi_k25":
        text |= {
            "model_type": "deepseek_v3", "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
            "kv_lora_rank": 8, "q_lora_rank": 16, "num_key_value_heads": 2, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1,
        }  # fmt: skip
        del text["head_dim"]
        tower = {**vision, "intermediate_size": 32, "pos_emb_height": 6, "pos_emb_width": 6}
        borders = {"vision_start_token_id": ids[TOKENS[kind][0]], "vision_end_token_id": ids[TOKENS[kind][2]]}
        return Kimi_K25ForConditionalGeneration(
            Kimi_K25Config(
                text_config=text, vision_config=tower, projection_hidden_size=16, image_token_id=image,
                video_token_id=len(tokenizer), tie_word_embeddings=False, **borders,
            )
        )  # fmt: skip
    vision |= {"image_size": SIDE[kind], "num_channels": 3}
    if kind == "gemma3":  # an image of 9 tokens is longer than the window
        text |= {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
        tower = {
            **vision,
            "intermediate_size": 32,
            "vision_use_head": False,
            "model_type": "siglip_vision_model",
        }
        return Gemma3ForConditionalGeneration(
            Gemma3Config(
                text_config=text, vision_config=tower, mm_tokens_per_image=PER_TILE[kind], image_token_index=image,
                boi_token_index=ids["<start_of_image>"], eoi_token_index=ids["<end_of_image>"],
            )
        )  # fmt: skip
    if kind == "internvl":
        tower = {**vision, "intermediate_size": 32}
        text |= {"model_type": "qwen2", "tie_word_embeddings": True}
        return InternVLForConditionalGeneration(
            InternVLConfig(
                text_config=text, vision_config=tower, image_token_id=image, image_seq_length=PER_TILE[kind]
            )
        )
    text |= {
        "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [1],
        "attention_chunk_size": 7, "floor_scale": 4, "no_rope_layers": [1, 0],
    }  # fmt: skip
    tower = {
        **vision, "intermediate_size": 64, "projector_input_dim": 24, "projector_output_dim": 24,
        "vision_output_dim": 24,
    }  # fmt: skip
    return Llama4ForConditionalGeneration(
        Llama4Config(
            text_config=text, vision_config=tower, image_token_index=image,
            boi_token_index=ids["<|image_start|>"], eoi_token_index=ids["<|image_end|>"],
        )
    )  # fmt: skip


def image_text(kind: str, rows: int, columns: int) -> str:
    """What the processor of transformers makes of an image's place in the template, for so many tiles, or patches."""
    if kind == "kimi_k25":
        return WRITTEN[kind].replace("<|media_pad|>", "<|media_pad|>" * (rows * columns // 4))
    per_tile, count = PER_TILE[kind], rows * columns
    if kind == "llama4":
        return str(Llama4Processor._prompt_split_image(SimpleNamespace(), (rows, columns), per_tile))
    if kind == "internvl":
        names = dict(zip(("start_image_token", "end_image_token", "image_token"), TOKENS[kind], strict=True))
        owner = SimpleNamespace(**names, image_seq_length=per_tile)
        inputs = {"num_patches": [1 if count == 1 else count + 1]}
        return str(InternVLProcessor.replace_image_token(owner, inputs, 0))
    begin, end, part = TOKENS[kind]
    owner = SimpleNamespace(full_image_sequence=f"\n\n{begin}{part * per_tile}{end}\n\n")
    return str(Gemma3Processor.replace_image_token(owner, {"num_crops": [0]}, 0))


def part_text(kind: str, rows: int, columns: int) -> str:
    """Of that, what an image carries as its own tokens."""
    if kind == "kimi_k25":
        return "<|media_pad|>" * (rows * columns // 4)
    return image_text(kind, rows, columns).strip("\n")


def plain_arguments(module: Any, path: Path, token_ids: Tensor, media: Sequence[Media]) -> dict[str, Tensor]:
    """What a model of transformers takes beside token ids [1, n] with these images."""
    processor = load_media_processor(path)
    assert processor is not None
    if not media:
        return {}
    dtype = next(module.parameters()).dtype
    found = {"pixel_values": torch.cat([processor.pixels(one) for one in media]).to(dtype)}
    if module.config.model_type not in TILED:
        found["image_grid_thw"] = torch.tensor([one.grid for one in media])
        if module.config.model_type != "kimi_k25":
            found["mm_token_type_ids"] = (token_ids == processor.token_ids["image"]).int()
    if module.config.model_type == "gemma3":
        found["token_type_ids"] = (token_ids == module.config.image_token_id).long()
    return found
