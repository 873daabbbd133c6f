"""A loaded model on packed tokens, compared with its own forward pass."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.engines.attention import NoContext, PackedAttention
from strop.engines.attention_form import AttentionContext, AttentionForm
from strop.engines.causal_lm import CausalLM, use_packed_attention
from strop.engines.head import Head
from strop.engines.linear_attention.packed import LINEAR, Context, Run
from strop.engines.linear_attention.states import Recurrence
from strop.engines.model_facts import logit_form, max_positions
from strop.engines.multimodal.inputs import media_inputs
from strop.engines.multimodal.probe import MediaProbe
from strop.engines.segments import Segment
from strop.engines.token_budget import is_out_of_memory

PROBE_LENGTHS = (12, 32)
"""Lengths of the two sequences on which a loaded model is compared with its own attention: packed, the short one lies
beside a longer one."""
PROBE_WINDOW = 5
"""Longer windows of attention are this short while a model is compared, so that the sequences reach beyond them."""
PROBE_LOGIT = 100.0
"""The largest logit there: a cap on logits changes small ones by less than rounding does."""
PROBE_TOLERANCE = 2e-3
"""Largest log-prob difference between two computations of the same, float32, for logits as they are; of a value model,
largest difference of final hidden states as a share of their largest entry."""
_LARGE_TOLERANCE = 2e-2
"""The same where the largest logit is `PROBE_LOGIT`."""

_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")
"""Names in models and their configurations of the number of tokens that attention looks back."""
_AGREED: set[tuple[object, ...]] = set()
"""Architectures (`_architecture`) that this process has compared, and that agreed."""
_REFUSAL = (
    "it has layers or a scaling of logits that packed computation does not have; choose another architecture"
)


class _Recorder:
    """Packed attention that notes which layers called it, and with which windows."""

    def __init__(self, attention: AttentionContext) -> None:
        self._attention = attention
        self.layers: list[int] = []
        self.recurrent: list[int] = []
        self.windows: set[int | None] = set()
        self.has_chunks = False

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        self.layers.append(layer)
        self.windows.add(form.window)
        self.has_chunks |= form.chunk is not None
        return self._attention.attend(layer, query, key, value, form)

    def recur(self, layer: int, run: Run, hidden: Tensor) -> Tensor:
        self.recurrent.append(layer)
        assert isinstance(self._attention, Context), "a model with such layers has one"
        return self._attention.recur(layer, run, hidden)


@torch.no_grad()
def check_packed(module: Any, device: torch.device, *, by_formula: bool = False) -> None:
    """Give the module packed attention, and compare it and our head with its own forward pass on two sequences.

    What short sequences and small numbers do not show is made to show: windows are shorter than the sequences, logits
    are large, and the packed pass is made in evaluation and in training mode, where some models draw noise. Two more
    conditions: every layer attends exactly once, in order (no recurrent or convolutional layers), and long-range
    patterns other than a sliding window that reaches our attention are refused.

    A process compares each architecture once: actor, reference and rollout engine often are one.

    Args:
        module: a model in evaluation mode; it ends in that mode.
        device: where it is.
        by_formula: compute attention by its formula in every layer, and in the part that reads media.

    Raises:
        ValueError: packed computation gives another result for this architecture.
    """
    media = media_inputs(module)
    architecture = _architecture(module, device, by_formula=by_formula)
    if architecture in _AGREED:
        use_packed_attention(module, media, by_formula=by_formula)
        return
    limit = max_positions(module.config) or max(PROBE_LENGTHS)
    sequences = [_ids(module, media, min(length, limit), device) for length in PROBE_LENGTHS]
    with _short_windows(module, media):
        head = _LargeLogits(module)
        reference = torch.cat([head.run_alone(ids) for ids in sequences])
        media_probe = None
        if media is not None and "image" in media.token_ids:
            media_probe = MediaProbe(module, media, device)
        use_packed_attention(module, media, by_formula=by_formula)
        model = CausalLM(module, compute_dtype=torch.float32, media=media)
        for is_training in (False, True):
            module.train(is_training)
            difference = float(head.difference(_run_packed(model, sequences), reference))
            module.eval()
            if not difference < head.tolerance:
                when = " in training mode" if is_training else ""
                raise ValueError(
                    f"{type(module).__name__} gives other {head.what} on packed tokens{when} than alone (largest "
                    f"difference {difference:.2g}): {_REFUSAL}"
                )
        if media_probe is not None and not (difference := media_probe.difference(model)) < PROBE_TOLERANCE:
            raise ValueError(
                f"{type(module).__name__} gives other log-probs on packed prompts with images than on each alone "
                f"(largest difference {difference:.2g}): {_REFUSAL}"
            )
    _AGREED.add(architecture)


def _architecture(module: Any, device: torch.device, *, by_formula: bool) -> tuple[object, ...]:
    """All that the comparison of a module depends on, but the numbers in its weights; its parts by class, whatever was
    patched into one."""
    settings = module.config.to_dict()
    settings.pop("_name_or_path", None)
    parts = frozenset(type(part) for part in module.modules())
    precisions = frozenset(weight.dtype for weight in module.parameters())
    return parts, precisions, json.dumps(settings, default=str, sort_keys=True), device, by_formula


class _LargeLogits:
    """A model's own results, with hidden states scaled before the head so that the largest logit is `PROBE_LOGIT`.

    A model without a language-model head is compared by its hidden states.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._head = module.get_output_embeddings()
        self._scale = 0.0
        self.what = "hidden states" if self._head is None else "log-probs"
        self.tolerance = PROBE_TOLERANCE if self._head is None else _LARGE_TOLERANCE

    def run_alone(self, ids: Tensor) -> Tensor:
        """Log-probs [T, V] of a sequence [T] by the module's own forward pass; hidden states [T, D] without a head."""
        if self._head is None:
            hidden: Tensor = self._module.base_model(input_ids=ids[None], use_cache=False).last_hidden_state
            return hidden[0].float()
        with self._head.register_forward_pre_hook(self._scaled):
            logits: Tensor = self._module(input_ids=ids[None], use_cache=False).logits
        return logits[0].float().log_softmax(-1)

    def _scaled(self, head: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self._scale:  # found in the first sequence
            largest = float(torch.nn.functional.linear(args[0], head.weight, head.bias).abs().max())
            self._scale = PROBE_LOGIT / largest if largest else 1.0
        return (args[0] * self._scale, *args[1:])

    def difference(self, hidden: Tensor, reference: Tensor) -> Tensor:
        """Largest difference of our result from hidden states [N, D] to the module's own."""
        if self._head is None:
            return (hidden.float() - reference).abs().max() / reference.abs().max()
        head = Head(self._head.weight, self._head.bias, None, *logit_form(self._module))
        ours = head.logits(hidden * (self._scale or 1.0)).float()
        return (ours.log_softmax(-1) - reference).abs().max()


def _ids(module: Any, media: Any, length: int, device: torch.device) -> Tensor:
    """Tokens [T] of text."""
    vocab = (module.get_output_embeddings() or module.get_input_embeddings()).weight.shape[0]
    never = set() if media is None else set(media.token_ids.values())
    text = [token for token in range(min(vocab, 4 * length)) if token not in never]
    return torch.tensor([text[(7 * position + 3) % len(text)] for position in range(length)], device=device)


@contextlib.contextmanager
def _short_windows(module: Any, media: object) -> Iterator[None]:
    """Windows of attention longer than `PROBE_WINDOW` have that length meanwhile; what reads media keeps its own."""
    decoder = module if media is None else module.get_decoder()
    owners = {id(part): part for part in decoder.modules()}
    configs = [module.config.get_text_config(), *(getattr(part, "config", None) for part in owners.values())]
    owners |= {id(config): config for config in configs if config is not None}
    changed = []
    for owner in owners.values():
        for name in _WINDOWS:
            value = vars(owner).get(name)
            if isinstance(value, int) and value > PROBE_WINDOW:
                setattr(owner, name, PROBE_WINDOW)
                changed.append((owner, name, value))
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def _run_packed(model: CausalLM, sequences: Sequence[Tensor]) -> Tensor:
    """Final hidden states [N, D] of the sequences in one row."""
    name = type(model.module).__name__
    ends = torch.tensor([len(ids) for ids in sequences]).cumsum(0).tolist()
    segments = [
        Segment(start=end - len(ids), length=len(ids)) for end, ids in zip(ends, sequences, strict=True)
    ]
    attention = PackedAttention(segments, device=model.device)
    recorder = _Recorder(attention if model.recurrence is None else model.recurrence.packed(attention))
    positions = torch.cat([torch.arange(len(ids), device=model.device) for ids in sequences])
    try:
        hidden = model.hidden(torch.cat(list(sequences))[None], positions[None], recorder)
    except NoContext as error:
        raise ValueError(
            f"{name} does not hand the arguments of its forward call on to its attention, as packed attention needs; "
            f"choose another architecture"
        ) from error
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        if is_out_of_memory(error):  # which says nothing of the architecture
            raise
        first_line = str(error).strip().split("\n")[0]
        raise ValueError(f"{name} does not run on packed tokens ({first_line}): {_REFUSAL}") from error
    _check_layers(model, recorder)
    return hidden


def _check_layers(model: CausalLM, recorder: _Recorder) -> None:
    name = type(model.module).__name__
    text = model.config.get_text_config()
    num_layers = getattr(text, "num_hidden_layers", len(recorder.layers))
    num_recurrent, attending = 0, list(range(num_layers))
    if isinstance(model.recurrence, Recurrence):
        num_recurrent, attending = model.recurrence.num_layers, list(model.recurrence.numbers)
    if recorder.recurrent != list(range(num_recurrent)):
        raise ValueError(
            f"{name} has {num_recurrent} layers that carry a state, of which {len(set(recorder.recurrent))} were asked "
            f"for packed tokens: {_REFUSAL}"
        )
    if not recorder.layers or recorder.layers != attending:
        raise ValueError(
            f"{name} attends in {len(set(recorder.layers))} of its {num_layers} layers on packed tokens: {_REFUSAL}"
        )
    kinds = set(getattr(text, "layer_types", None) or ())
    unseen = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    unseen -= {LINEAR} if num_recurrent else set()
    if "sliding_attention" in kinds and recorder.windows == {None}:
        unseen.add("sliding_attention")
    if "chunked_attention" in kinds and not recorder.has_chunks:
        unseen.add("chunked_attention")
    if unseen:
        raise ValueError(f"{name} has layers of type {', '.join(sorted(unseen))}: {_REFUSAL}")
