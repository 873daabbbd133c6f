"""The names of transformers 4 in the folders of saved models.

Other programs read these folders, many of them with transformers 4, which passes over names that came with version 5
and takes its defaults in their place: another base of the rotary embeddings, so another model, and nothing says so. A
folder has both names where both say the same.
"""

from __future__ import annotations

import copy
import json
import logging
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedTokenizerBase

from strop.engines.model_folder import reading
from strop.utils.atomic_io import replace_text
from strop.utils.safe_read import read_json

logger = logging.getLogger(__name__)

_CLASS_OF_5, _CLASS_OF_4 = "TokenizersBackend", "PreTrainedTokenizerFast"
"""One class: any tokenizer.json."""


def write_older_config(folder: Path) -> None:
    """Add the older names to config.json: `rope_theta`, `rope_scaling` and the like, and `torch_dtype`.

    Those of rotary embeddings are added where transformers reads the same from them alone as from its own. A model
    whose class is in its folder has the names that its code reads.
    """
    path = folder / "config.json"
    settings: dict[str, Any] = read_json(path)
    if settings.get("auto_map") or settings.get("model_type") not in CONFIG_MAPPING:
        return
    both, older = copy.deepcopy(settings), copy.deepcopy(settings)
    for part, part_older in zip(_parts(both), _parts(older), strict=True):
        names = _rope_names(part["rope_parameters"])
        part.update(names)
        part_older.update(names)
        if names:
            del part_older["rope_parameters"]
    written = both if _are_read_alike(*map(json.dumps, (settings, both, older))) else settings
    if isinstance(dtype := written.get("dtype"), str):
        written["torch_dtype"] = dtype
    _replace(path, written)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files, its settings under names that both versions read; after any settings of media, whose
    own file of the chat template (chat_template.json) goes before the tokenizer's wherever a processor is loaded."""
    tokenizer.save_pretrained(folder)
    of_processor = folder / "chat_template.json"
    if of_processor.is_file() and isinstance(tokenizer.chat_template, str):
        _replace(of_processor, {"chat_template": tokenizer.chat_template})
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = read_json(path)
    if settings.get("tokenizer_class") == _CLASS_OF_5:
        settings["tokenizer_class"] = _CLASS_OF_4
    if isinstance(settings.get("extra_special_tokens"), list):  # version 4 has a mapping under this name
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    _replace(path, settings)


def _parts(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Configurations with rotary embeddings: the whole, and those of the models in it."""
    for part in (settings, *settings.values()):
        if isinstance(part, dict) and isinstance(part.get("rope_parameters"), dict):
            yield part


def _rope_names(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary embeddings in the older names; none where they have no base. Kinds of layers may have their own."""
    layers = rope.get("full_attention", rope)
    if not isinstance(layers, dict) or "rope_theta" not in layers:
        return {}
    scaling = {
        key: value for key, value in layers.items() if key not in ("rope_theta", "partial_rotary_factor")
    }
    names = {"rope_theta": layers["rope_theta"], "rope_scaling": None}
    if scaling != {"rope_type": "default"}:
        names["rope_scaling"] = scaling
    if "partial_rotary_factor" in layers:
        names["partial_rotary_factor"] = layers["partial_rotary_factor"]
    if isinstance(local := rope.get("sliding_attention"), dict) and "rope_theta" in local:
        names["rope_local_base_freq"] = local["rope_theta"]
    return names


@lru_cache(maxsize=64)
def _are_read_alike(*configs: str) -> bool:
    """True if transformers reads the same rotary embeddings from all of these texts, and none is an error; all
    checkpoints of a run have the same."""
    read = []
    with tempfile.TemporaryDirectory(prefix="strop-config-") as folder:
        for text in configs:
            (Path(folder) / "config.json").write_text(text, encoding="utf-8")
            try:
                with reading(folder, "the older names cannot say this"):
                    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            except ValueError as error:
                logger.debug("%s", error)
                return False
            read.append([part["rope_parameters"] for part in _parts(config.to_dict())])
    return all(rope == read[0] for rope in read)


def _replace(path: Path, settings: dict[str, Any]) -> None:
    replace_text(path, json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
