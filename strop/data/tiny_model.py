"""A small model folder, made on the spot: a tokenizer of characters and a Qwen3 model with random weights.

It is an ordinary Hugging Face folder, so whatever trains it trains a downloaded model too. One character is
one token, and a role header is one token, so prompts are short and the task is visible in the tokens.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from strop.utils.atomic_io import share_as_usual
from strop.utils.rng import random_key

CHARACTERS = "\n" + "".join(chr(code) for code in range(0x20, 0x7F))
"""New line and printable ASCII: the text that the tokenizer knows."""
PAD, END_OF_TURN, UNKNOWN = "<|endoftext|>", "<|im_end|>", "<|unk|>"
ROLES = ("system", "user", "assistant", "tool")
"""Roles of the chat template; each has a header token such as <|user|>."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
        {{- raise_exception('unknown role ' + message['role']) -}}
    {%- endif -%}
    {{- '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; control tokens for roles, end of turn and padding.

    Characters outside of ASCII become <|unk|>.
    """
    specials = [PAD, END_OF_TURN, UNKNOWN, *(f"<|{role}|>" for role in ROLES)]
    vocabulary = {token: index for index, token in enumerate([*specials, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN, fuse_unk=False))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers has no types here
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(
    folder: Path,
    *,
    seed: int,
    hidden_size: int = 128,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 384,
    max_position_embeddings: int = 1024,
) -> None:
    """Write tokenizer, configuration, float32 weights and generation settings to a folder.

    The weights are a pure function of the seed and the sizes; torch's global random state is not used.
    Existing files of the folder are replaced.

    Args:
        folder: made when it does not exist.
        seed: of the weights.
        hidden_size: width of the residual stream; so for the other sizes of a Qwen3 model.
    """
    tokenizer = make_tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.device("meta"):  # no weight is drawn from the global generator
        model = Qwen3ForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    _fill_weights(model, seed=seed, num_layers=num_layers)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]  # as above
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    share_as_usual(*folder.glob("*.safetensors"))
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _fill_weights(model: Qwen3ForCausalLM, *, seed: int, num_layers: int) -> None:
    """Norms one; matrices normal with variance 1 / inputs, those that write to the residual stream smaller.

    Each parameter has its own generator, so its values do not depend on the order of parameters. The tied
    embedding has the spread that makes first logits small: an almost uniform policy.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        generator = torch.Generator().manual_seed(random_key(seed, "tiny_model", name) >> 1)  # 63 bits
        parameter.normal_(std=_spread(name, tuple(parameter.shape), num_layers), generator=generator)


def _spread(name: str, shape: tuple[int, ...], num_layers: int) -> float:
    """Standard deviation of a matrix [outputs, inputs]."""
    if "embed_tokens" in name:
        return 0.5 / math.sqrt(shape[1])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return 1 / math.sqrt(2 * num_layers * shape[1])
    return 1 / math.sqrt(shape[1])
