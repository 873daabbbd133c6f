from __future__ import annotations

import hashlib
import json
import string
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from strop.data.tiny_model import make_tiny_model, make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
PRINTABLE = "\n" + string.digits + string.ascii_letters + string.punctuation + " "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_model(path, seed=0, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)
    return path


def digest(path: Path) -> str:
    return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


@settings(max_examples=100, deadline=None)
@given(st.text(PRINTABLE, max_size=40))
def test_printable_text_survives_encoding_one_token_per_character(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    if "<|" not in text:  # the text of a control token is that token
        assert len(ids) == len(text)


def test_every_printable_character_has_its_own_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(PRINTABLE)
    assert len(set(ids)) == len(PRINTABLE) == 96
    assert tokenizer.unk_token_id not in ids
    assert [tokenizer.decode([index]) for index in ids] == list(PRINTABLE)
    assert tokenizer.encode("aé") == [*tokenizer.encode("a"), tokenizer.unk_token_id]
    assert tokenizer.decode(tokenizer.encode("<|user|>hi<|im_end|>"), skip_special_tokens=True) == "hi"


def test_the_chat_template_costs_three_tokens_a_prompt(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "reverse: stop"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>reverse: stop<|im_end|><|assistant|>"
    assert len(tokenizer.encode(text)) == len("reverse: stop") + 3
    with pytest.raises(Exception, match="unknown role critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "no"}])


def test_the_folder_is_an_ordinary_model(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(tokenizer)  # every id that can be sampled can be decoded
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert generation.pad_token_id == tokenizer.pad_token_id
    logits = model(torch.tensor([tokenizer.encode("reverse: stop")])).logits
    assert logits.shape == (1, 13, len(tokenizer))
    assert logits.isfinite().all()
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert entropy.min() > 0.9 * torch.tensor(float(len(tokenizer))).log()  # an almost uniform policy


def test_weights_depend_on_the_seed_only(folder: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    before = torch.get_rng_state()
    make_tiny_model(tmp_path / "same", seed=0, **sizes)
    make_tiny_model(tmp_path / "other", seed=1, **sizes)
    assert torch.equal(torch.get_rng_state(), before)
    assert digest(tmp_path / "same") == digest(folder) != digest(tmp_path / "other")
    torch.rand(3)
    make_tiny_model(tmp_path / "same", seed=0, **sizes)
    assert digest(tmp_path / "same") == digest(folder)


def test_default_sizes(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, seed=3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    # 103 tokens of 128; per layer q and o 128*128, k and v 128*64, mlp 3*128*384, norms 2*128 + 2*32; the
    # last norm 128
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128 + 2 * 32
    assert model.num_parameters() == 103 * 128 + 3 * layer + 128
