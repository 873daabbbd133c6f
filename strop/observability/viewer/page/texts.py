"""Tokens of a run as texts, without loading a library of models where its tokenizer is one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.samples import decoder
from strop.run import RunError
from strop.utils.safe_read import check_regular

Decode = Callable[[Sequence[int]], str]
_FILE = "tokenizer.json"


def decode_of(run: RunRecords) -> Decode | None:
    """Tokens as text; None where the tokenizer is not here any more."""
    model = run.config.get("model")
    settings: dict[str, Any] = model if isinstance(model, dict) else {}
    saved = sorted(run.path.glob("checkpoints/global_step_*/model"))[-1:]
    paths = [Path(str(name)) for name in (settings.get("tokenizer_path"), settings.get("path")) if name]
    for folder in (*saved, *paths):
        decode = _of_file(folder / _FILE)
        if decode is not None:
            return decode
    try:
        return decoder(run.path)
    except (RunError, ValueError, OSError):
        return None


def _of_file(path: Path) -> Decode | None:
    from tokenizers import Tokenizer  # part of transformers, and light

    try:
        check_regular(path)
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 (there is none, or one of another form, for which the library has no class)
        return None
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
