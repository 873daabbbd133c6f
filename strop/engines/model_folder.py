"""Model folders that somebody else may have made: what is checked before a library reads one, what its errors become.

transformers and tokenizers open whatever bears a name, and raise errors of any kind for what they cannot use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from strop.base.foreign_files import TooLarge, check_regular, read_json
from strop.base.trust import ask
from strop.engines.config import ModelConfig

_MAX_TEXT_BYTES = 2**30
"""Of a tokenizer or a configuration."""
_MAX_TEMPLATE_BYTES = 2**20
_MAX_SETTING = {"layer": 4096, "label": 2**17, "expert": 2**14, "": 2**40}
"""Largest integers in config.json, by what is in their names: so many things would be built one by one. What is said
`per_layer` (vocab_size_per_layer_input of Gemma 3n) is a size."""
_WEIGHTS = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@contextlib.contextmanager
def reading(folder: str | Path, complaint: str) -> Iterator[None]:
    """Around a library that reads a model folder: everything in it is a file, and every error becomes a sentence.

    Args:
        folder: the model folder.
        complaint: beginning of the sentence, such as `model.path 'x' has no usable tokenizer`.

    Raises:
        ValueError: something in the folder is no file or too large, or the library raised any error.
    """
    check_entries(folder, complaint)
    try:
        yield
    except (
        Exception
    ) as error:  # of any class: KeyError, TypeError, a bare Exception of tokenizers, MemoryError
        raise ValueError(f"{complaint}: {_first_line(error)}") from error


def check_entries(folder: str | Path, complaint: str) -> None:
    """Refuse a folder, or one right below it, with an entry that is neither file nor folder, or a text without end.

    Raises:
        ValueError: the first such entry.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{complaint}: {folder} is no folder")
    below = [Path(folder)]
    for path in sorted(Path(folder).iterdir()):
        below += [path] if path.is_dir() and not path.is_symlink() else []
    for parent in below:
        for path in sorted(parent.iterdir()):
            try:
                if path.is_dir():
                    if path.suffix:  # the name of a file
                        check_regular(path)
                    continue
                size = check_regular(path)
                limit = _MAX_TEMPLATE_BYTES if path.suffix == ".jinja" else _MAX_TEXT_BYTES
                if path.suffix != _WEIGHTS and path.suffix not in _PICKLES and size > limit:
                    raise TooLarge(path, size, limit)
            except OSError as error:
                raise ValueError(f"{complaint}: {path.name}: {error.strerror}") from error


def check_weights(folder: str | Path) -> None:
    """Refuse a folder whose weights are no safetensors, or that is an adapter to another model.

    Raises:
        ValueError: the sentence says what it holds instead.
    """
    names = sorted(path.name for path in Path(folder).iterdir())
    if "adapter_config.json" in names:
        raise ValueError(
            f"model folder {str(folder)!r} has an adapter_config.json, so its weights are those of another model: give "
            f"that model's folder, with the adapter as model.lora.path"
        )
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles and not any(name.endswith(_WEIGHTS) for name in names):
        raise ValueError(
            f"model folder {str(folder)!r} has its weights as pickles only ({pickles[0]}), which can run code when "
            f"they are read: save the model as safetensors (model.save_pretrained(FOLDER) does)"
        )


def check_settings(settings: Mapping[str, Any], complaint: str) -> None:
    """Refuse the settings of a model of an absurd size, before a library makes it.

    Args:
        settings: content of config.json.
        complaint: beginning of the sentence of an error.

    Raises:
        ValueError: the sentence names the setting.
    """
    for name, value in _numbers(settings):
        most = next(limit for part, limit in _MAX_SETTING.items() if part in name.replace("per_layer", ""))
        if value > most:
            raise ValueError(f"{complaint}: {name} is {value}, and no model is built with more than {most}")


def runs_own_code(config: ModelConfig) -> bool:
    """Whether the code of a model folder may be run (model.trust_remote_code).

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
    """The end-of-sequence tokens in the generation settings of a model folder; none where it has no such file.

    Raises:
        ValueError: the file cannot be read, or names something else.
    """
    path = folder / "generation_config.json"
    if not os.path.lexists(path):
        return []
    complaint = f"the generation settings of {str(folder)!r} cannot be used"
    found = model_json(path, complaint).get("eos_token_id")
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError(f"{complaint}: eos_token_id is {found!r:.80}, and tokens are numbers from 0")
    return tokens


def _numbers(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _numbers({str(key): inner for key, inner in value.items()})
        elif isinstance(value, int) and "theta" not in str(
            name
        ):  # the base of rotary embeddings may be anything
            yield str(name), value


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    first = " ".join(line.strip() for line in lines[:2]) if lines[0].endswith(":") else lines[0]
    return first if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {first}"
