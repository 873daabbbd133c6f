"""vLLM engines of a rollout worker."""

from __future__ import annotations

import torch

from strop.engines.multimodal.inputs import media_reader
from strop.engines.pretrained_config import load_model_config
from strop.engines.tokenizer import unused_tokens
from strop.rollout.engine_group import EngineContext, Generation
from strop.rollout.replicas.subprocess_engine import subprocess_settings
from strop.rollout.vllm.engine import start_vllm
from strop.rollout.vllm.settings import Settings


async def make_vllm(context: EngineContext) -> Generation:
    """vLLM of a rollout worker; raises as `start_vllm`."""
    own = subprocess_settings(context)
    shape = load_model_config(context.model)
    reader = media_reader(shape, context.model.path)
    settings = Settings(
        model=own.model,
        trust_remote_code=context.model.trust_remote_code,
        dtype=own.dtype,
        device=own.device,
        max_tokens=context.max_tokens,
        max_running=context.rollout.max_running,
        num_threads=torch.get_num_threads(),
        shares_device=context.trained is not None,
        log=own.log,
        reader=reader,
        architecture=(shape.architectures or [""])[0],
        nodes=(context.node, *(follower.host for follower in context.followers)) if context.followers else (),
        records_routing=context.rollout.router_replay,
        unused_tokens=unused_tokens(context.model, int(shape.get_text_config().vocab_size)),
    )
    engine = await start_vllm(
        context.rollout.vllm, settings, own.weights, version=context.version, followers=context.followers
    )
    return Generation(
        engine=engine,
        policy=None,
        target=engine.target,
        scores=engine.log_probs,
        dtype=own.dtype,
        reader=reader,
    )
