"""A role of a checkpoint as an ordinary Hugging Face folder, proved by its log-probs.

The weights go from their shards into one model, and from there into files. What was written is then loaded by plain
transformers, which must find every weight and no other, and the two give their log-probs on a few sequences. One
model is in memory at a time, in the precision that it was trained in.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, ModelConfig
from strop.engines.lora.adapters import has_adapter, merged_tensors, save_adapter
from strop.engines.model_folder import reading, runs_own_code
from strop.engines.model_support.parity import PROBE_TOLERANCE
from strop.engines.moe.layers import CHOICE_BIASES
from strop.engines.multimodal.families import takes_media
from strop.engines.multimodal.inputs import copy_settings, language_model_class
from strop.engines.packing import make_rows
from strop.engines.pretrained_config import stored_scheme
from strop.engines.pretrained_module import read_module
from strop.engines.tokens import Tokens
from strop.engines.training import Engine
from strop.engines.transformers4 import save_tokenizer
from strop.engines.value_models import only_errors
from strop.engines.weights import hugging_face_name, named_weights
from strop.trainer.saved_role import ACTOR, read_role, role_sources

PROBE_LENGTHS = (17, 32, 5)
"""Tokens of the sequences on which the two models are compared."""
_FILE_BYTES = "5GB"  # of one weight file: as the hub has them


@dataclass(frozen=True, kw_only=True)
class Export:
    """A folder that was written and proved."""

    folder: Path
    num_tensors: int
    num_bytes: int
    """Of all tensors."""
    difference: float
    """Largest difference of log-probs (of a critic: values) between the checkpoint's weights, rounded to the type
    asked for, in our engine and the folder in plain transformers."""
    rounding: float
    """Largest difference that the rounding itself makes; 0 where nothing was rounded."""
    is_value_model: bool = False
    """A critic or a reward model."""

    @property
    def quantity(self) -> str:
        """Name of the numbers that are compared."""
        return "value" if self.is_value_model else "log-prob"

    def describe(self) -> str:
        """`export ok: 310 tensors, 0.54 GiB, probe log-prob diff 0.0004`."""
        rounding = f" (rounding moves them by {self.rounding:.4f})" if self.rounding else ""
        tensors = f"{self.num_tensors:,}".replace(",", " ")
        return (
            f"export ok: {tensors} tensors, {_size(self.num_bytes)}, probe {self.quantity} diff "
            f"{self.difference:.4f}{rounding}"
        )


def export_role(
    checkpoint: Path,
    out: Path,
    config: ModelConfig,
    *,
    role: str = ACTOR,
    dtype: torch.dtype | None = None,
    adapter_only: bool = False,
    base: str = "",
) -> Export:
    """Write a role of a checkpoint as a Hugging Face folder, and compare it with the checkpoint's weights.

    A run with LoRA gives its base model with the adapter merged into it.

    Args:
        checkpoint: its folder; the manifest was checked.
        out: absent or empty; it appears when the comparison has passed.
        config: the model that the run started from.
        role: ACTOR, CRITIC or PRM.
        dtype: of the weights, but for those that must stay in float32; None leaves them as they were trained.
        adapter_only: write a PEFT adapter folder instead, for a run with LoRA.
        base: name of the model under the adapter in that folder; empty: the folder that the run started from.

    Raises:
        ValueError: the checkpoint has no such role, or is damaged; `out` is taken; or what was written gives other
            numbers, in which case nothing is left of it.
        OSError: the disk refused.
    """
    out = out.absolute()
    _check_absent(out)
    writing = out.with_name(f".exporting-{out.name}")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir(parents=True)
        result = _write_and_prove(checkpoint, writing, config, role, dtype, adapter_only, base)
        if out.is_dir():
            out.rmdir()
        writing.rename(out)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return dataclasses.replace(result, folder=out)


def _write_and_prove(
    checkpoint: Path,
    folder: Path,
    config: ModelConfig,
    role: str,
    dtype: torch.dtype | None,
    adapter_only: bool,
    base: str,
) -> Export:
    model = read_role(checkpoint, config, role=role)
    model.media = None  # compared as text with plain transformers, where every token can be sampled
    model.unused_tokens = ()
    if adapter_only and not has_adapter(model):
        raise ValueError(
            f"{checkpoint} was trained without adapters (model.lora.rank is 0), so it has none to export; leave "
            f"--adapter out"
        )
    sequences = probe_sequences(model)
    trained = probe(model, sequences)
    trained_dtype = model.head_weight.dtype
    is_value_model = model.is_value_model
    if adapter_only:
        rounded = trained
        save_adapter(model, folder, base=base)
    else:
        _merge(model)
        _round(model, dtype or trained_dtype)
        rounded = probe(model, sequences) if dtype not in (None, trained_dtype) else trained
        _save(model, folder, dtype or trained_dtype)
    del model
    sources = role_sources(checkpoint, role, config)
    plain = _load_plain(folder, config, trained_dtype, is_value_model=is_value_model, is_adapter=adapter_only)
    if role == ACTOR and not is_value_model:
        _keep_generation_settings(sources, folder)
    if takes_media(plain.config):
        copy_settings(sources, folder)
    _save_tokenizer(sources, folder, config)
    difference = _largest(rounded, plain_probe(plain, sequences))
    num_tensors, num_bytes = _sizes(folder)
    export = Export(
        folder=folder,
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        difference=difference,
        rounding=_largest(trained, rounded),
        is_value_model=is_value_model,
    )
    if not difference <= PROBE_TOLERANCE:
        raise ValueError(
            f"the export of {checkpoint} gives other {export.quantity}s in plain transformers than in training "
            f"(largest difference {difference:.2g}, at most {PROBE_TOLERANCE:g} is rounding); nothing was written. The "
            f"model's code in transformers does something that training does not"
        )
    return export


def probe_sequences(model: CausalLM) -> list[Tensor]:
    """Token ids spread over the vocabulary: sequences of PROBE_LENGTHS, cut where the model takes only shorter ones."""
    module: Any = model.module
    vocab = int(module.get_input_embeddings().weight.shape[0])
    longest = model.max_positions or max(PROBE_LENGTHS)
    return [
        (torch.arange(min(length, longest)) * 7919 + 104729 * number + 3) % vocab
        for number, length in enumerate(PROBE_LENGTHS)
    ]


def probe(model: CausalLM, sequences: Sequence[Tensor]) -> Tensor:
    """Log-probs of all tokens but the first in our engine; of a value model, the value at the end of each sequence."""
    if model.is_value_model:
        rows = make_rows(sequences, [torch.zeros(1, dtype=torch.int64)] * len(sequences))
    else:
        rows = make_rows([ids[:1] for ids in sequences], [ids[1:] for ids in sequences])

    def asked(tokens: Tokens) -> dict[str, Tensor]:
        return {"probe": tokens.values() if model.is_value_model else tokens.log_probs(temperature=1.0)[0]}

    engine = Engine(model, EngineConfig(max_tokens_per_device=sum(PROBE_LENGTHS)), is_frozen=False)
    return engine.map_tokens(rows, asked)["probe"]


@torch.no_grad()
def plain_probe(module: Any, sequences: Sequence[Tensor]) -> Tensor:
    """Result of `probe` by the model's own forward pass, one sequence at a time."""
    results = []
    module.config.pad_token_id = None  # classifiers look for the last token that is not this one
    for ids in sequences:
        logits = module(input_ids=ids[None], use_cache=False).logits[0]
        if logits.dim() == 1:
            results.append(logits)
        else:
            results.append(logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return torch.cat(results)


def _size(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.01 else f"{num_bytes / 2**20:.2f} MiB"


def _largest(a: Tensor, b: Tensor) -> float:
    """Largest difference, as a share of the largest number where that is above 1: values have any scale."""
    return float((a.double() - b.double()).abs().max() / b.abs().max().clamp(min=1.0))


@torch.no_grad()
def _merge(model: CausalLM) -> None:
    """Add an adapter to the weights under it, one at a time, and take the adapter's own part to 0."""
    if not has_adapter(model):
        return
    weights = named_weights(model.module)
    for name, tensor in merged_tensors(model):
        weights[name].copy_(tensor)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.zero_()


@torch.no_grad()
def _round(model: CausalLM, dtype: torch.dtype) -> None:
    wide = _wide_names(model, dtype)
    for name, tensor in named_weights(model.module).items():
        if tensor.is_floating_point() and tensor.dtype != dtype and name not in wide:
            tensor.copy_(tensor.to(dtype))


def _wide_names(model: CausalLM, dtype: torch.dtype) -> set[str]:
    """Weights that are exported as they are: those that transformers reads in float32 whatever is asked for, and
    buffers, which are not trained. Experts are chosen by the last bits of some."""
    module: Any = model.module
    listed = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        listed |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    buffers = {hugging_face_name(name) for name, _ in module.named_buffers()}
    names = named_weights(module)
    listed |= set(CHOICE_BIASES)
    return {name for name in names if name in buffers or any(f".{part}." in f".{name}." for part in listed)}


def _save(model: CausalLM, folder: Path, dtype: torch.dtype) -> None:
    module: Any = model.module
    names = _wide_names(model, dtype)
    wide = {name: tensor.clone() for name, tensor in named_weights(module).items() if name in names}
    module.to(dtype)
    state = named_weights(module) | wide  # without what PEFT adds to the names
    module.save_pretrained(folder, state_dict=state, max_shard_size=_FILE_BYTES)
    model.finish_saved(folder)


def _keep_generation_settings(sources: Sequence[Path], folder: Path) -> None:
    """The file as the run's model has it: `save_pretrained` leaves out what it takes for defaults."""
    for source in sources:
        path = source / "generation_config.json"
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
            return


def _save_tokenizer(sources: Sequence[Path], folder: Path, config: ModelConfig) -> None:
    """The tokenizer of the checkpoint, or of the model that the run started from."""
    for source in sources:
        if any(path.name.startswith(("tokenizer", "vocab")) for path in source.glob("*")):
            with reading(source, f"the tokenizer in {source} cannot be used"):
                tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=runs_own_code(config))
                save_tokenizer(tokenizer, folder)
            return
    raise ValueError(
        f"there is no tokenizer in {sources[0]}, {sources[1]} or {sources[2]}; put one into the first"
    )


def _load_plain(
    folder: Path, config: ModelConfig, dtype: torch.dtype, *, is_value_model: bool, is_adapter: bool
) -> Any:
    """The exported folder, loaded by plain transformers; every weight must be there, and no other."""
    trust = runs_own_code(config)
    auto_class: Any = AutoModelForSequenceClassification
    if not is_value_model:
        auto_class = language_model_class(
            AutoConfig.from_pretrained(config.path if is_adapter else folder, trust_remote_code=trust)
        )
    options: dict[str, Any] = {"num_labels": 1} if is_value_model else {}
    if is_adapter:
        with only_errors():  # the head of a reward model is the adapter's
            if stored_scheme(config) is None:
                base = auto_class.from_pretrained(
                    config.path, dtype=dtype, trust_remote_code=trust, **options
                )
            else:  # transformers would read it quantised, or not at all
                wide = dataclasses.replace(config, dtype="float64" if dtype == torch.float64 else "float32")
                base = read_module(wide, auto_class, may_miss="score.", **options)
        base.load_adapter(str(folder))  # transformers' own way to PEFT
        return base.eval()
    loaded: Any = auto_class.from_pretrained(
        folder, dtype=dtype, trust_remote_code=trust, output_loading_info=True, **options
    )
    module, loading = loaded
    for kind, verb in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "also holds"),
        ("mismatched_keys", "misshapes"),
    ):
        names = sorted(map(str, loading[kind]))
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(
                f"the export {verb} {names[0]}{more} when plain transformers loads it as {type(module).__name__}; "
                f"nothing was written"
            )
    return module.eval()


def _sizes(folder: Path) -> tuple[int, int]:
    """Number of tensors in the weight files, and their bytes."""
    num_tensors, num_bytes = 0, 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            num_tensors += len(file.keys())
        with path.open("rb") as raw:
            num_bytes += path.stat().st_size - 8 - int.from_bytes(raw.read(8), "little")
    return num_tensors, num_bytes


def _check_absent(out: Path) -> None:
    if out.is_dir():
        names = sorted(path.name for path in out.iterdir())
        if not names:
            return
        raise ValueError(
            f"{out} is not empty (it holds {', '.join(names[:3])}); give an absent or empty folder"
        )
    if out.exists():
        raise ValueError(f"{out} is a file; give an absent or empty folder")
