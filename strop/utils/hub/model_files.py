"""Files of a model that are fetched: its settings, its tokenizer and its weights as safetensors, each once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from strop.utils.safe_read import read_json

INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_SETTINGS = (
    "*config.json", "tokenizer*.json", "tokenizer*.model", "spiece.model", "sentencepiece*.model", "*.tiktoken",
    "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.json", "*.jinja",
    "additional_chat_templates/*.jinja", INDEX,
)  # fmt: skip
"""Settings, tokenizer and chat template, as patterns."""
STALE = ("*.safetensors", "*.safetensors.index.json")
"""Files of an earlier model at a hub that would be read beside or in place of those of a new one, as patterns."""
_TOKENIZERS = ("tokenizer", "vocab.", "spiece", "sentencepiece", "merges")


def settings_files(names: Iterable[str], *, code: bool = False) -> list[str]:
    """The small files of a model: no code unless `code`, and of folders below it templates alone."""
    patterns = (*_SETTINGS, "*.py") if code else _SETTINGS
    return sorted(
        name
        for name in names
        if any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)
    )


def weight_files(names: Collection[str], index: Mapping[str, Any] | None) -> list[str]:
    """The files of a model with its weights.

    Args:
        names: of all its files.
        index: content of `model.safetensors.index.json`; None without.

    Raises:
        ValueError: the index names files that are not there, or there are weights of other kinds alone.
    """
    if index is not None:
        shards = sorted({str(name) for name in dict(index.get("weight_map", {})).values()})
        lost = [name for name in shards if name not in names]
        if lost or not shards:
            raise ValueError(
                f"its {INDEX} names {lost[0] if lost else 'no file'}, which is not among its files"
            )
        return shards
    weights = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    for usual in ("model.safetensors", "adapter_model.safetensors"):
        if usual in weights:
            return [usual]
    if weights:
        return weights
    other_formats = sorted(
        name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5"))
    )
    description = f"only {other_formats[0]}" if other_formats else "no weights at all"
    raise ValueError(
        f"it has {description}, and strop reads safetensors alone: take a revision or a copy that has them "
        f"(model.save_pretrained(FOLDER) writes them)"
    )


def lacking(folder: Path, *, weights: bool = True, tokenizer: bool = True) -> str:
    """The first file that a folder would need and does not have; empty where it is whole."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if ADAPTER not in names:
        if weights and "config.json" not in names:
            return "config.json"
        if tokenizer and not any(n.startswith(_TOKENIZERS) or n.endswith(".tiktoken") for n in names):
            return "the tokenizer"
    if not weights:
        return ""
    try:
        weight_files(names, read_json(folder / INDEX) if INDEX in names else None)
    except ValueError as error:
        return f"weights ({error})" if INDEX in names else "model.safetensors"
    return ""
