"""Tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from strop.engines import model_overrides
from strop.engines.config import ModelConfig
from strop.engines.model_folder import model_json, reading, runs_own_code
from strop.engines.multimodal.families import takes_media, written_template
from strop.engines.pretrained_config import load_model_config
from strop.engines.unused_tokens import unused_token_ids
from strop.utils.chat_template import asks_for_time, render_with, stop_clock, trust_template
from strop.utils.chat_template.answers import keep_special_tokens
from strop.utils.embedding_rows import set_num_rows
from strop.utils.hub.models import fetch_copy


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises:
        ValueError: the folder does not exist or holds no tokenizer.
    """
    shape, source = load_model_config(config), config.tokenizer_folder
    key = "model.tokenizer_path" if config.tokenizer_path else "model.path"
    fetch_copy(Path(source), weights=False, tokenizer=True, offline=config.local_files_only)
    if not Path(source).is_dir():
        raise ValueError(f"{key} {source!r} is not a folder; give one with a tokenizer")
    if not _has_tokenizer(source):
        names = sorted(p.name for p in Path(source).iterdir())
        raise ValueError(
            f"{key} {source!r} has no tokenizer files (found: {', '.join(names[:8])}); save the tokenizer "
            f"into the folder: tokenizer.save_pretrained(FOLDER)"
        )
    complaint = f"{key} {source!r} has no usable tokenizer"
    trust = runs_own_code(config)
    with reading(source, complaint):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
        tokenizer.decode(
            tokenizer("probe", add_special_tokens=False)["input_ids"]
        )  # also settings are used here
    size: int | None = getattr(shape.get_text_config(), "vocab_size", None)
    if config.tokenizer_path and size is not None and len(tokenizer) > size:
        raise ValueError(
            f"{key} {source!r} has {len(tokenizer)} tokens, and the model in {config.path!r} knows {size}: give a "
            f"tokenizer that it was trained with"
        )
    of_processor = Path(source) / "chat_template.json"
    if not tokenizer.chat_template and of_processor.is_file():  # some models for images keep it there alone
        template = model_json(of_processor, complaint).get("chat_template")
        if not isinstance(template, str):
            raise ValueError(f"{complaint}: {of_processor.name} has no text under chat_template")
        tokenizer.chat_template = template
    if config.chat_template:
        tokenizer.chat_template = model_overrides.template_text(config.chat_template)
    if takes_media(shape) and isinstance(tokenizer.chat_template, str):
        render_with(tokenizer, written_template(shape, tokenizer.chat_template))
    if trust:
        trust_template(tokenizer)
    if asks_for_time(tokenizer.chat_template):
        stop_clock(tokenizer, config.template_date)
    keep_special_tokens(tokenizer, config.keep_special_tokens)
    if size is not None:
        set_num_rows(tokenizer, size)
    return tokenizer


def _has_tokenizer(folder: str) -> bool:
    """True if a folder has files of a tokenizer. Without them transformers makes one with an empty vocabulary,
    and says nothing."""
    names = [path.name for path in Path(folder).iterdir()]
    return any(
        name.startswith(("token", "vocab")) or name.endswith((".model", ".tiktoken")) for name in names
    )


def unused_tokens(config: ModelConfig, num_rows: int) -> tuple[int, ...]:
    """Ids below `num_rows` for which a model's tokenizer has no token (unused_tokens.py); none without a tokenizer.

    Raises:
        ValueError: as `load_tokenizer`.
    """
    source = config.tokenizer_folder
    fetch_copy(Path(source), weights=False, tokenizer=True, offline=config.local_files_only)
    if not Path(source).is_dir() or not _has_tokenizer(source):
        return ()
    return unused_token_ids(load_tokenizer(config), num_rows, config.path)
