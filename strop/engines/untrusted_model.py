"""Model folders that somebody else may have made: what is refused before a library opens what is in them.

transformers and tokenizers open whatever bears a name, and build as much as the settings ask for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from strop.utils.safe_read import TooLarge, check_regular

SAFE = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WEIGHTS = (SAFE, *PICKLES)
"""Ends of names of files with weights."""

_MAX_TEXT_BYTES = 2**30
"""Of a tokenizer or a configuration."""
_MAX_TEMPLATE_BYTES = 2**20
_MAX_SETTING = {"layer": 4096, "label": 2**17, "expert": 2**14, "": 2**40}
"""Largest integers in config.json, by what is in their names: so many things would be built one by one. What is said
`per_layer` (vocab_size_per_layer_input of Gemma 3n) is a size."""


def check_entries(folder: str | Path, complaint: str) -> None:
    """Refuse a folder, or one right below it, with an entry that is neither file nor folder, or a text without end.

    Raises:
        ValueError: the first such entry.
    """
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
                if path.suffix not in WEIGHTS and size > limit:
                    raise TooLarge(path, size, limit)
            except OSError as error:
                raise ValueError(f"{complaint}: {path.name}: {error.strerror}") from error


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


def _numbers(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _numbers({str(key): inner for key, inner in value.items()})
        elif isinstance(value, int) and "theta" not in str(
            name
        ):  # the base of rotary embeddings may be anything
            yield str(name), value
