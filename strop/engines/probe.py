"""A loaded model on packed tokens, compared with its own forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strop.engines.attention import PackedAttention, Segment
from strop.engines.causal_lm import CausalLM
from strop.engines.head import scaled_logits
from strop.engines.vision_probe import picture_probe, use_packed_attention

PROBE_TOKENS = 12
"""Length of the two sequences on which a loaded model is compared with its own attention."""
PROBE_TOLERANCE = 2e-3
"""Largest log-prob difference in that comparison, float32; of a value model, largest difference of final hidden
states as a share of their largest entry."""

_REFUSAL = (
    "it has layers or a scaling of logits that packed computation does not have; choose another architecture"
)


class _Recorder:
    """Packed attention that notes which layers called it, and with which windows."""

    def __init__(self, attention: PackedAttention) -> None:
        self._attention = attention
        self.layers: list[int] = []
        self.windows: set[int | None] = set()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        self.layers.append(layer)
        self.windows.add(window)
        return self._attention.attend(layer, query, key, value, scaling=scaling, window=window)


@torch.no_grad()
def check_packed(module: Any, device: torch.device) -> None:
    """Give the module packed attention, and compare it and our head with its own forward pass on two sequences.

    Two more conditions, because numbers on short sequences can agree by accident: every layer attends exactly
    once, in order (no recurrent or convolutional layers), and long-range patterns other than a sliding window
    that reaches our attention are refused.

    Raises:
        ValueError: packed computation gives another result for this architecture.
    """
    name = type(module).__name__
    has_logits = module.get_output_embeddings() is not None
    vocab = module.get_input_embeddings().weight.shape[0]
    if has_logits:
        vocab = module.get_output_embeddings().weight.shape[0]
    ids = (torch.arange(2 * PROBE_TOKENS, device=device).view(2, -1) * 7 + 3) % vocab
    if has_logits:
        own = module(input_ids=ids, use_cache=False).logits
    else:
        own = module.base_model(input_ids=ids, use_cache=False).last_hidden_state
    own = own.flatten(0, 1).float()
    picture_difference = picture_probe(module, device)
    use_packed_attention(module)
    model = CausalLM(module, compute_dtype=torch.float32)
    segments = [Segment(start=i * PROBE_TOKENS, length=PROBE_TOKENS) for i in range(2)]
    recorder = _Recorder(PackedAttention(segments, device=device))
    positions = torch.arange(PROBE_TOKENS, device=device).repeat(2)[None]
    try:
        hidden = model.hidden(ids.view(1, -1), positions, recorder)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ValueError(f"{name} does not run on packed tokens ({first_line}): {_REFUSAL}") from error
    _check_layers(model, recorder)
    if has_logits:
        ours = scaled_logits(hidden, model.head_weight, model.head_bias, 1.0).float()
        difference = float((ours.log_softmax(-1) - own.log_softmax(-1)).abs().max())
        what = "log-probs"
    else:
        difference = float((hidden.float() - own).abs().max() / own.abs().max())
        what = "hidden states"
    if not difference < PROBE_TOLERANCE:
        raise ValueError(
            f"{name} gives other {what} on packed tokens than alone (largest difference {difference:.2g}): {_REFUSAL}"
        )
    if picture_difference is not None and not (difference := picture_difference(module)) < PROBE_TOLERANCE:
        raise ValueError(
            f"{name} gives other log-probs on packed prompts with images than on each alone (largest difference "
            f"{difference:.2g}): {_REFUSAL}"
        )


def _check_layers(model: CausalLM, recorder: _Recorder) -> None:
    name = type(model.module).__name__
    text = model.config.get_text_config()
    num_layers = getattr(text, "num_hidden_layers", len(recorder.layers))
    if recorder.layers != list(range(num_layers)):
        raise ValueError(
            f"{name} attends in {len(set(recorder.layers))} of its {num_layers} layers on packed tokens: {_REFUSAL}"
        )
    kinds = set(getattr(text, "layer_types", None) or ())
    unseen = kinds - {"full_attention", "sliding_attention"}
    if "sliding_attention" in kinds and recorder.windows == {None}:
        unseen.add("sliding_attention")
    if unseen:
        raise ValueError(f"{name} has layers of type {', '.join(sorted(unseen))}: {_REFUSAL}")
