"""vLLM engines of a rollout worker."""

from __future__ import annotations

from pathlib import Path

import torch

from strop.engines.model import load_model_config, unused_tokens
from strop.engines.multimodal.inputs import media_reader
from strop.rollout.engine_group import Generation, Place
from strop.rollout.replicas.subprocess_engine import own_process
from strop.rollout.vllm.engine import Settings, start_vllm


async def make_vllm(place: Place) -> Generation:
    """vLLM for this place; raises as `start_vllm`."""
    own = own_process(place)
    shape = load_model_config(place.model)
    reader = media_reader(shape, place.model.path)
    settings = Settings(
        model=str(Path(place.model.path).absolute()),
        trust_remote_code=place.model.trust_remote_code,
        dtype=own.dtype,
        device=own.device,
        max_tokens=place.max_tokens,
        max_running=place.rollout.max_running,
        num_threads=torch.get_num_threads(),
        shares_device=place.trained is not None,
        log=own.log,
        reader=reader,
        architecture=(shape.architectures or [""])[0],
        unused_tokens=unused_tokens(place.model, int(shape.get_text_config().vocab_size)),
    )
    engine = await start_vllm(place.rollout.vllm, settings, own.held, version=place.version)
    return Generation(
        engine=engine,
        policy=None,
        target=engine.target,
        scores=engine.log_probs,
        dtype=own.dtype,
        reader=reader,
    )
