"""A Hugging Face causal language model on packed tokens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from strop.device import device_name
from strop.engines.attention import ATTENTION_NAME, AttentionContext, PackedAttention, Segment
from strop.engines.config import ModelConfig
from strop.engines.head import scaled_logits

PROBE_TOKENS = 12
"""Length of the two sequences on which a loaded model is compared with its own attention."""
PROBE_TOLERANCE = 2e-3
"""Largest log-prob difference in that comparison, float32."""


class CausalLM:
    """A causal language model whose forward pass takes packed tokens and an attention context.

    Training and native generation use one such object: the same parameters, the same functions.
    """

    def __init__(self, module: nn.Module, *, compute_dtype: torch.dtype) -> None:
        self.module = module
        self.compute_dtype = compute_dtype
        self.config: Any = module.config
        self._backbone: nn.Module = module.base_model  # type: ignore[assignment]
        head: Any = module.get_output_embeddings()  # type: ignore[operator]
        self._head: nn.Linear = head
        self.device = head.weight.device
        _disable_dropout(module)

    @property
    def head_weight(self) -> Tensor:
        """[V, D] of the language-model head."""
        return self._head.weight

    @property
    def head_bias(self) -> Tensor | None:
        """[V] of the language-model head, or None."""
        return self._head.bias

    @property
    def vocab_size(self) -> int:
        """Rows of the language-model head; a tokenizer may use fewer."""
        return int(self.head_weight.shape[0])

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model's positions are made for; None when the configuration names none."""
        limit: int | None = getattr(self.config, "max_position_embeddings", None)
        return limit

    def hidden(self, input_ids: Tensor, position_ids: Tensor, context: AttentionContext) -> Tensor:
        """Final hidden states [N, D] of packed tokens [1, N] at positions [1, N]."""
        with self.precision():
            output = self._backbone(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, strop_context=context
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Compute in bfloat16 when the configuration says so; the parameters stay as they are."""
        if self.compute_dtype == torch.bfloat16:
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                yield
        else:
            yield

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names; tied ones once."""
        return self.module.named_parameters()

    def save(self, folder: Path) -> None:
        """Write config and weights as an ordinary Hugging Face folder (safetensors)."""
        self.module.save_pretrained(folder)  # type: ignore[operator]


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of a model folder.

    Raises:
        ValueError: the folder does not exist or holds no tokenizer.
    """
    _check_folder(config)
    names = sorted(p.name for p in Path(config.path).iterdir())
    # Without these files transformers makes a tokenizer with an empty vocabulary, and says nothing.
    if not any(
        name.startswith(("token", "vocab")) or name.endswith((".model", ".tiktoken")) for name in names
    ):
        raise ValueError(
            f"model.path {config.path!r} has no tokenizer files (found: {', '.join(names[:8])}); save the tokenizer "
            f"into the folder: tokenizer.save_pretrained(FOLDER)"
        )
    try:
        return AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.path {config.path!r} has no usable tokenizer: {_first_line(error)}"
        ) from error


def load_model(config: ModelConfig, *, device: str = "auto", weights_from: Path | None = None) -> CausalLM:
    """Load a model folder for packed computation, and compare it with its own attention.

    Args:
        config: path, precision, checkpointing.
        device: `auto` or a device name.
        weights_from: another folder to take the weights from, for example a checkpoint.

    Raises:
        ValueError: no such folder, no causal language model in it, or an architecture whose result differs on
            packed tokens (recurrent layers, soft-capped logits).
    """
    _check_folder(config)
    place = torch.device(device_name(device))
    dtype = _compute_dtype(config, place)
    module = _read_module(config, weights_from, torch.float64 if dtype == torch.float64 else torch.float32)
    if dtype == torch.float64:
        _use_exact_norms(module)
    module.to(place)
    module.eval()
    _check_packed(module, place)
    if config.gradient_checkpointing:
        # The second name is that of older versions of transformers.
        later = hasattr(module, "activation_checkpointing_enable")
        enable = module.activation_checkpointing_enable if later else module.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        module.train()  # transformers recomputes only in training mode; every dropout is 0
    return CausalLM(module, compute_dtype=dtype)


class _ExactNorm(nn.Module):
    """RMS norm in the precision of its input.

    Those of transformers compute in float32 whatever the model has, which rounds a difference of 1e-16 between two
    layouts of the same tokens up to one of 1e-8.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden * weight / sqrt(mean(hidden^2) + eps) over the last axis."""
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)


def _use_exact_norms(module: nn.Module) -> None:
    """Replace the norms of the Llama family, told by their `variance_epsilon`; the weights keep their names."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if hasattr(child, "variance_epsilon"):
                norm: Any = child
                setattr(parent, name, _ExactNorm(norm.weight, norm.variance_epsilon))


def _read_module(config: ModelConfig, weights_from: Path | None, dtype: torch.dtype) -> Any:
    """The model with every weight of its architecture found in the folder."""
    source = str(weights_from or config.path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=config.trust_remote_code, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"model folder {source!r} holds no loadable causal language model: {_first_line(error)}"
        ) from error
    module, loading = loaded
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ValueError(
            f"model folder {source!r} has no weights for {missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''} of {type(module).__name__}, which would "
            f"start at random; give a folder with all weights of a causal language model"
        )
    return module


def _check_folder(config: ModelConfig) -> None:
    if not config.path:
        raise ValueError("model.path is not set; give a Hugging Face model folder: model.path=FOLDER")
    folder = Path(config.path)
    if not folder.is_dir():
        raise ValueError(
            f"model.path {config.path!r} is not a folder; give a Hugging Face model folder on this machine"
        )
    if not (folder / "config.json").is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ValueError(
            f"model.path {config.path!r} has no config.json (found: {found}); is it a model folder?"
        )
    try:
        AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"model.path {config.path!r} has a config.json that does not describe a model: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[config.dtype]


def describe_precision(config: ModelConfig, device: str = "auto") -> str:
    """The precision in force, and on a CPU, by a short measurement, what the other one would bring.

    `compute: float32 on cpu; bfloat16 products run 2.6 times as fast here (model.dtype=bfloat16 uses them)`.
    """
    place = torch.device(device_name(device))
    dtype = _compute_dtype(config, place)
    line = f"compute: {str(dtype).removeprefix('torch.')} on {place.type}"
    if place.type != "cpu" or dtype == torch.float64:
        return line
    speedup = bfloat16_speedup()
    if dtype == torch.bfloat16:
        return f"{line}; its products run {speedup:.1f} times as fast as those of float32 here"
    hint = " (model.dtype=bfloat16 uses them, at lower precision)" if speedup > 1 else ""
    return f"{line}; products of bfloat16 would run {speedup:.1f} times as fast here{hint}"


def bfloat16_speedup(device: str = "cpu", *, size: int = 512, repeats: int = 5) -> float:
    """How many times faster a bfloat16 matrix product runs than a float32 one on this machine (about 50 ms)."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(size, size, dtype=dtype, device=device)
        a @ a
        start = time.perf_counter()
        for _ in range(repeats):
            a @ a
        seconds[dtype] = time.perf_counter() - start
    return seconds[torch.float32] / seconds[torch.bfloat16]


def _disable_dropout(module: nn.Module) -> None:
    """Set every dropout to 0: a sampled log-prob must be the trained one."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):  # OPT and others keep rates as plain numbers
                setattr(part, name, 0.0)


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
def _check_packed(module: Any, device: torch.device) -> None:
    """Compare packed attention and our head with the model's own forward pass on two short sequences.

    Two more conditions, because numbers on short sequences can agree by accident: every layer attends exactly
    once, in order (no recurrent or convolutional layers), and long-range patterns other than a sliding window
    that reaches our attention are refused.
    """
    name = type(module).__name__
    vocab = module.get_output_embeddings().weight.shape[0]
    ids = (torch.arange(2 * PROBE_TOKENS, device=device).view(2, -1) * 7 + 3) % vocab
    own = module(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
    module.set_attn_implementation(ATTENTION_NAME)
    model = CausalLM(module, compute_dtype=torch.float32)
    segments = [Segment(start=i * PROBE_TOKENS, length=PROBE_TOKENS) for i in range(2)]
    recorder = _Recorder(PackedAttention(segments, device=device))
    positions = torch.arange(PROBE_TOKENS, device=device).repeat(2)[None]
    refusal = "it has layers or a scaling of logits that packed computation does not have; choose another architecture"
    try:
        hidden = model.hidden(ids.view(1, -1), positions, recorder)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{name} does not run on packed tokens ({_first_line(error)}): {refusal}") from error
    num_layers = getattr(model.config, "num_hidden_layers", len(recorder.layers))
    if recorder.layers != list(range(num_layers)):
        raise ValueError(
            f"{name} attends in {len(set(recorder.layers))} of its {num_layers} layers on packed tokens: {refusal}"
        )
    kinds = set(getattr(model.config, "layer_types", None) or ())
    unseen = kinds - {"full_attention", "sliding_attention"}
    if "sliding_attention" in kinds and recorder.windows == {None}:
        unseen.add("sliding_attention")
    if unseen:
        raise ValueError(f"{name} has layers of type {', '.join(sorted(unseen))}: {refusal}")
    ours = scaled_logits(hidden, model.head_weight, model.head_bias, 1.0).float()
    difference = float((ours.log_softmax(-1) - own.log_softmax(-1)).abs().max())
    if not difference < PROBE_TOLERANCE:
        raise ValueError(
            f"{name} gives other log-probs on packed tokens than alone (largest difference {difference:.2g}): {refusal}"
        )
