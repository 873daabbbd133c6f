"""SGLang engines of a rollout worker."""

from __future__ import annotations

from pathlib import Path

from strop.engines.model import load_model_config, unused_tokens
from strop.rollout.engine_group import Generation, Place
from strop.rollout.replicas.subprocess_engine import own_process
from strop.rollout.sglang.engine import SglangSettings, start_sglang


async def make_sglang(place: Place) -> Generation:
    """SGLang for this place; raises as `start_sglang`."""
    own = own_process(place)
    vocab_size = int(load_model_config(place.model).get_text_config().vocab_size)
    settings = SglangSettings(
        model=str(Path(place.model.path).absolute()),
        trust_remote_code=place.model.trust_remote_code,
        dtype=own.dtype,
        vocab_size=vocab_size,
        unused_tokens=unused_tokens(place.model, vocab_size),
        max_tokens=place.max_tokens,
        max_running=place.rollout.max_running,
        log=own.log,
    )
    engine = await start_sglang(place.rollout.sglang, settings, own.held, version=place.version)
    return Generation(
        engine=engine, policy=None, target=engine.target, scores=engine.log_probs, dtype=own.dtype
    )
