"""Step rollout: tokens per second of the native engine beside transformers, and the bound by memory."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.agreement import note_captures, pages
from benchmarks.gpu.look import Facts, Look
from benchmarks.gpu.profiling import profiled, waits_by_line
from benchmarks.gpu.timing import GIB, peak_gib, quantiles, seconds
from benchmarks.gpu.workload import (
    asks,
    generate,
    loaded,
    model_folder,
    num_parameters,
    random_prompts,
    token_bytes,
)
from strop.engines.causal_lm import CausalLM
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.cuda_graph import StaticStep, cuda_graphs
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native.request import Request


def rollout(look: Look) -> None:
    """Sequences of 512 tokens, 64 and 256 at a time, with prompts of 128."""
    sizes = (look.size(64, 4), look.size(256, 8))
    _strop(look, sizes)
    look.clean()
    plain: Any = AutoModelForCausalLM.from_pretrained(
        model_folder(look), dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    plain = plain.to(look.device).eval()
    for batch in sizes:
        look.measure(
            f"generate of transformers, {batch} sequences",
            partial(_generate, look, plain, batch),
            needs_s=12,
        )


def _strop(look: Look, sizes: tuple[int, int]) -> None:
    model = loaded(look, "bfloat16")
    for batch in sizes:
        look.measure(f"native, {batch} sequences", partial(_native, look, model, batch), needs_s=15)
    look.measure(
        f"native, {sizes[0]} sequences, every step waited for",
        lambda facts: _native(look, model, sizes[0], facts, waits=True),
        needs_s=15,
    )
    look.measure(
        f"native, {sizes[0]} sequences, without fused layers",
        lambda facts: _native(look, model, sizes[0], facts, fuses=False),
        needs_s=15,
    )
    look.measure("decode steps, profiled", lambda facts: _profile(look, model, sizes, facts), needs_s=15)


def _prompt_tokens(look: Look) -> int:
    return look.size(128, 8)


def _note_rate(look: Look, facts: Facts, *, batch: int, tokens: int, taken: float) -> None:
    """Tokens per second, and the share of the time in which weights in bfloat16 once per step, and keys and values of
    every sequence, could be read."""
    seen = batch * sum(_prompt_tokens(look) + n for n in range(tokens))
    num_bytes = tokens * 2 * num_parameters(look) + seen * token_bytes(look)
    bound = num_bytes / (1e12 * look.ceilings(facts)["copy_tb_per_s"])
    facts |= {"new_tokens": tokens, "tokens_per_s": round(batch * tokens / taken)}
    facts |= {"ms_per_step": round(1e3 * taken / tokens, 3), "share_of_bound": round(bound / taken, 3)}
    facts |= peak_gib(look)


def _native(
    look: Look, model: CausalLM, batch: int, facts: Facts, *, waits: bool = False, fuses: bool = True
) -> None:
    """Twice: the first time shapes are captured, the second time they are there. With `waits` the tokens of a step are
    read before the next one is launched; without `fuses` the model's own pass is captured. `slots_gib`: keys and values
    without pages that samples of a prompt share."""
    engine, tokens = NativeEngine(model, max_running=batch), look.size(512, 24)
    if waits:
        engine._batch._reads_behind = False
    if not fuses and look.device == "cuda":
        engine._batch._steps = StaticStep(engine._batch._decoder, cuda_graphs())
    for seed, name in ((1, "cold_s"), (2, "warm_s")):
        asked = asks(
            batch // min(8, batch), min(8, batch), prompt=_prompt_tokens(look), tokens=tokens, seed=seed
        )
        look.sync()
        begin = time.perf_counter()
        outputs = generate(engine, asked)
        look.sync()
        taken = time.perf_counter() - begin
        facts[name] = round(taken, 3)
    if any(len(output.token_ids) != tokens for output in outputs):
        facts["shorter"] = sum(len(output.token_ids) < tokens for output in outputs)
    _note_rate(look, facts, batch=batch, tokens=tokens, taken=taken)
    note_captures(engine, facts)
    slots = batch * (_prompt_tokens(look) + tokens) * token_bytes(look)
    facts |= {"cache_gib": round(engine._batch.cache_bytes / GIB, 3), "slots_gib": round(slots / GIB, 3)}
    facts |= pages(engine)
    asyncio.run(engine.close())


def _profile(look: Look, model: CausalLM, sizes: tuple[int, int], facts: Facts) -> None:
    """Decode steps in the middle of generation: times, what the device does, and lines that wait for it."""
    for batch in sizes:
        steps = DecodeBatch(model, max_running=batch)
        asked = asks(
            batch // min(8, batch), min(8, batch), prompt=_prompt_tokens(look), tokens=look.size(400, 60)
        )
        steps.waiting.extend(Request(f"r{i}", tuple(ids), how) for i, (ids, how) in enumerate(asked))
        for _ in range(look.size(120, 12)):
            steps.step(0)
        taken = [1e3 * seconds(look, partial(steps.step, 0), warm=0) for _ in range(look.size(30, 4))]
        facts[f"ms_of_a_step_{batch}"] = quantiles(taken)

        def some(steps: DecodeBatch = steps) -> None:
            for _ in range(look.size(10, 2)):
                steps.step(0)

        trace = look.out / "profile.json.gz" if batch == sizes[0] else None
        facts[f"profile_{batch}"] = profiled(look, some, trace=trace, top=8)
        facts[f"waits_{batch}"] = waits_by_line(look, some)
        steps.read_rest()
        steps.remove(list(steps.running))
        steps.free()
        look.clean()


def _generate(look: Look, plain: Any, batch: int, facts: Facts) -> None:
    tokens = look.size(64, 8)
    ids = torch.tensor(random_prompts(batch, _prompt_tokens(look)), device=look.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0, "pad_token_id": 0}

    def some(count: int) -> None:
        plain.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)

    with torch.no_grad():
        some(4)
        taken = seconds(look, lambda: some(tokens), warm=0)
    _note_rate(look, facts, batch=batch, tokens=tokens, taken=taken)
