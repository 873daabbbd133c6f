"""Checks of a model folder before a library reads it, and sentences in place of its errors.

transformers and tokenizers raise errors of any kind for what they cannot use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from strop.engines.checkpoint_reader import DTYPES
from strop.engines.config import ModelConfig
from strop.engines.untrusted_model import PICKLES, SAFE, check_entries
from strop.utils.safe_read import read_json
from strop.utils.trust import ask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@contextlib.contextmanager
def reading(folder: str | Path, complaint: str) -> Iterator[None]:
    """Around a library that reads a model folder: everything in it is a file, and every error becomes a sentence.

    Args:
        folder: the model folder.
        complaint: beginning of the sentence, such as `model.path 'x' has no usable tokenizer`.

    Raises:
        ValueError: something in the folder is no file or too large, or the library raised any error.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{complaint}: {folder} is no folder")
    check_entries(folder, complaint)
    try:
        yield
    except (
        Exception
    ) as error:  # of any class: KeyError, TypeError, a bare Exception of tokenizers, MemoryError
        raise ValueError(f"{complaint}: {_first_line(error)}") from error


_FEW_BITS = ("F8_", "F6_", "F4")
"""Beginnings of safetensors' names of floating-point types of at most eight bits."""
_INTEGERS = ("I", "U")


def check_weights(folder: str | Path, types: Mapping[str, str]) -> None:
    """Refuse a folder whose weights are no safetensors, are quantised, or that is an adapter to another model.

    Args:
        folder: of the model.
        types: of its weights, as of `stored_types`.

    Raises:
        ValueError: the sentence says what it holds instead.
    """
    names = sorted(path.name for path in Path(folder).iterdir())
    if "adapter_config.json" in names:
        raise ValueError(
            f"model folder {str(folder)!r} has an adapter_config.json, so its weights are those of another model: give "
            f"that model's folder, with the adapter as model.lora.path"
        )
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not any(name.endswith(SAFE) for name in names):
        raise ValueError(
            f"model folder {str(folder)!r} has its weights as pickles only ({pickles[0]}), which can run code when "
            f"they are read: save the model as safetensors (model.save_pretrained(FOLDER) does)"
        )
    for name, dtype in types.items():
        if dtype.startswith(_FEW_BITS) or (name.endswith("weight") and dtype.startswith(_INTEGERS)):
            raise ValueError(
                f"model folder {str(folder)!r} has quantised weights ({name} is stored as {dtype}), which are neither "
                f"trained nor generated with; give a folder of the same model in bfloat16 or float32"
            )


def weight_paths(folder: str | Path) -> list[Path]:
    """Files of weights that a library reads: the one of the usual name, or those of the index; else all."""
    whole, index = Path(folder) / f"model{SAFE}", Path(folder) / f"model{SAFE}.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        return sorted({Path(folder) / name for name in read_json(index)["weight_map"].values()})
    return sorted(Path(folder).glob(f"*{SAFE}"))


def stored_types(folder: str | Path) -> dict[str, str]:
    """Type of each weight in a model folder, by the names of safetensors, from the headers of its files."""
    types: dict[str, str] = {}
    for path in weight_paths(folder):
        with safe_open(path, framework="pt") as file:
            types |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  (not a dictionary)
    return types


def floating_types(types: Mapping[str, str]) -> set[torch.dtype]:
    """Floating-point types among those of weights, as of `stored_types`."""
    return {DTYPES[name] for name in types.values() if name in DTYPES and DTYPES[name].is_floating_point}


_DECODERS = ("decoder", "generator", "text_config")
"""Parts of config.json that may name the end-of-sequence tokens in its place."""


def runs_own_code(config: ModelConfig) -> bool:
    """True if the code of a model folder may be run (model.trust_remote_code).

    Raises:
        UntrustedCode: received settings ask for it.
    """
    if config.trust_remote_code:
        ask("model.trust_remote_code", f"the code in {config.path}")
    return config.trust_remote_code


def model_json(path: Path, complaint: str) -> dict[str, Any]:
    """The mapping in a JSON file of a model folder.

    Raises:
        ValueError: it cannot be read, or is none.
    """
    try:
        value = read_json(path)
    except OSError as error:
        raise ValueError(f"{complaint}: {path.name}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{complaint}: {path.name} is no JSON: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{complaint}: {path.name} is a {type(value).__name__} and no mapping")
    return value


def end_tokens(folder: Path) -> list[int]:
    """The end-of-sequence tokens in the generation settings of a model folder; where it has no such file, those in its
    config.json, from which transformers and vLLM make the settings then. There a number below 0 means that there is
    none.

    Raises:
        ValueError: the file cannot be read, or names something else.
    """
    path = folder / "generation_config.json"
    if os.path.lexists(path):
        complaint = f"the generation settings of {str(folder)!r} cannot be used"
        tokens = _listed(model_json(path, complaint).get("eos_token_id"))
    elif os.path.lexists(path := folder / "config.json"):
        complaint = f"the settings of the model {str(folder)!r} cannot be used"
        config = model_json(path, complaint)
        parts = [config, *(part for name in _DECODERS if isinstance(part := config.get(name), dict))]
        named = next((ids for part in parts if (ids := part.get("eos_token_id")) is not None), None)
        tokens = [token for token in _listed(named) if not (type(token) is int and token < 0)]
    else:
        return []
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError(
            f"{complaint}: eos_token_id of {path.name} is {tokens!r:.80}, and tokens are numbers from 0"
        )
    return tokens


def _listed(value: Any) -> list[Any]:
    """One value or several, as a list; none where there is none."""
    return value if isinstance(value, list) else [] if value is None else [value]


def named_ends(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The end-of-sequence tokens that the tokenizer and the settings of the model folder name, at which every program
    stops.

    Raises:
        ValueError: as `end_tokens`.
    """
    eos = tokenizer.eos_token_id
    return frozenset({*end_tokens(Path(model.path)), *(() if eos is None else (int(eos),))})


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    first = " ".join(line.strip() for line in lines[:2]) if lines[0].endswith(":") else lines[0]
    return first if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {first}"
