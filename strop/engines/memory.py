"""Memory of a device that an update needs, from a model's configuration alone."""

from __future__ import annotations

from typing import Any

import torch

from strop.engines.config import EngineConfig, ModelConfig
from strop.engines.model import weights_of_folder
from strop.engines.precision import compute_dtype
from strop.engines.pretrained_config import load_model_config
from strop.utils.device import device_name
from strop.utils.machine_limits import device_bytes

BESIDE = 1.2
"""Activations of a whole update over those of the formula: measured on an H100 (benchmarks/RESULTS.md)."""
HEAD_BYTES = 2 << 30
"""Logits of a chunk of the head with their gradient."""
TRAINED_BYTES = 16
"""Of a parameter that is trained: itself, its gradient and two moments, in float32."""
GIB = 1 << 30


def activation_bytes(shape: Any, num_tokens: int, *, item_bytes: int, checkpointing: bool) -> int | None:
    """Memory of the decoder layers for the backward pass of so many packed tokens; None for an unknown architecture.

    Of a token and layer, with D the hidden size, Q and K the sizes of all query and key heads, I the inner size: the
    residual stream and norms in float32 (12 D + 4 (Q + K)), inputs and output of attention (2 Q + 2 K) and four of the
    gated part (4 I) in the precision of computation.

    Args:
        shape: the configuration of the language model.
        num_tokens: of a forward pass.
        item_bytes: of a number in the precision of computation.
        checkpointing: only the inputs of layers are kept, and one layer is computed again at a time.
    """
    text = shape.get_text_config()
    try:
        layers, hidden, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
        inner = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    except AttributeError:
        return None
    inner *= getattr(text, "num_experts_per_tok", None) or 1
    dim = getattr(text, "head_dim", None) or hidden // heads
    queries, keys = heads * dim, (getattr(text, "num_key_value_heads", None) or heads) * dim
    layer = 12 * hidden + 4 * (queries + keys) + item_bytes * (2 * queries + 2 * keys + 4 * inner)
    per_token = layers * 4 * hidden + layer if checkpointing else layers * layer
    return int(BESIDE * per_token * num_tokens)


def describe_memory(
    model: ModelConfig, engine: EngineConfig, *, device: str, ranks: int, total_bytes: int | None = None
) -> str:
    """Line about the memory of an update, and where that is too much, the setting that fits; empty on a CPU.

    `memory: an update needs about 8.9 GiB for weights and optimizer and 31.2 for activations of 16384 tokens, of 79.2
    GiB`.

    Args:
        model, engine: of the policy.
        device: as resources.device.
        ranks: that share its weights.
        total_bytes: memory of the device; None: asked for.
    """
    target = torch.device(device_name(device))
    if target.type == "cpu" and total_bytes is None:
        return ""
    total = device_bytes(target) if total_bytes is None else total_bytes
    checkpointing, tokens = model.gradient_checkpointing, engine.max_tokens_per_device
    item_bytes = compute_dtype(model, target).itemsize
    shape = load_model_config(model)
    needed = activation_bytes(shape, tokens, item_bytes=item_bytes, checkpointing=checkpointing)
    if needed is None:
        return ""
    numbers = sum(torch.Size(weight.shape).numel() for weight in weights_of_folder(model).weights)
    bytes_per_weight = TRAINED_BYTES if not model.lora.enabled else 4
    fixed = numbers * bytes_per_weight // ranks + HEAD_BYTES
    line = (
        f"memory: an update needs about {fixed / GIB:.1f} GiB for weights, optimizer and head and {needed / GIB:.1f} "
        f"for activations of {tokens} tokens, of {total / GIB:.1f} GiB"
    )
    if fixed + needed <= total:
        return line
    fits = max(0, (total - fixed) * tokens // needed) // 256 * 256
    advice = [] if checkpointing else ["set model.gradient_checkpointing=true"]
    if fits:
        advice.insert(0, f"set actor.engine.max_tokens_per_device={fits}")
    return (
        f"{line}, which is too much: {' or '.join(advice) or 'use more ranks, or adapters (model.lora.rank)'}"
    )
