"""SGLang engines of a rollout worker."""

from __future__ import annotations

from strop.engines.pretrained_config import load_model_config
from strop.engines.tokenizer import unused_tokens
from strop.rollout.engine_group import EngineContext, Generation
from strop.rollout.replicas.subprocess_engine import subprocess_settings
from strop.rollout.sglang.engine import SglangSettings, start_sglang


async def make_sglang(context: EngineContext) -> Generation:
    """SGLang of a rollout worker; raises as `start_sglang`."""
    own = subprocess_settings(context)
    vocab_size = int(load_model_config(context.model).get_text_config().vocab_size)
    settings = SglangSettings(
        model=own.model,
        trust_remote_code=context.model.trust_remote_code,
        dtype=own.dtype,
        vocab_size=vocab_size,
        unused_tokens=unused_tokens(context.model, vocab_size),
        max_tokens=context.max_tokens,
        max_running=context.rollout.max_running,
        log=own.log,
    )
    engine = await start_sglang(context.rollout.sglang, settings, own.weights, version=context.version)
    return Generation(
        engine=engine, policy=None, target=engine.target, scores=engine.log_probs, dtype=own.dtype
    )
