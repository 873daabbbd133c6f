"""Step agreement: log-probs of rollout and trainer, greedy tokens of `generate`, and a model that is not captured."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from benchmarks.gpu.look import Facts, Look
from benchmarks.gpu.timing import GIB
from benchmarks.gpu.workload import Ask, asks, generate, loaded, model_folder, random_prompts, token_bytes
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, ModelConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.training import Engine
from strop.rollout.native import batch, running
from strop.rollout.native.cuda_graph import StaticStep
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native.paged_cache import PagedCache
from strop.rollout.types import TokenOutput

LIMITS = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest difference of a log-prob: rounding in other places, of log-probs near 12."""


def agreement(look: Look) -> None:
    """Compare, in float32 and in bfloat16."""
    for dtype in LIMITS:
        look.measure(f"rollout and trainer, {dtype}", partial(_log_probs, look, dtype))
        look.measure(f"greedy tokens, {dtype}", partial(_greedy, look, dtype))
    look.measure("tokens in little memory", lambda facts: _little_memory(look, facts), needs_s=10)
    look.measure(
        "a model whose steps cannot be captured (GPT-2)", lambda facts: _uncaptured(look, facts), needs_s=15
    )


def outputs_both_ways(look: Look, model: CausalLM, asked: list[Ask], facts: Facts) -> list[TokenOutput]:
    """Outputs of captured steps, compared with those of the model's own forward pass."""
    outputs = {}
    for way in ("captured", "own"):
        engine = NativeEngine(model, max_running=64)
        if way == "own":
            engine._batch._steps = None
        outputs[way] = generate(engine, asked)
        note_captures(engine, facts)
        asyncio.run(engine.close())
        if look.device == "cuda" and torch.cuda.current_stream() != torch.cuda.default_stream():
            raise RuntimeError(f"generation of kind {way!r} left the process on another stream")
    facts["equal_tokens"] = _equal_share(outputs["captured"], outputs["own"])
    return outputs["captured"]


def note_captures(engine: NativeEngine, facts: Facts) -> None:
    """Captured steps of the engine, where it has any."""
    steps = engine._batch._steps
    if isinstance(steps, StaticStep):
        facts |= {
            "num_captured": steps.num_captured,
            "captures_disabled": steps.is_disabled,
            "has_fused_layers": steps.has_fused_layers,
        }


def pages(engine: NativeEngine) -> Facts:
    """GiB of the pool of pages and of those that were used at one time, and how often a larger pool took its place;
    nothing on a CPU."""
    cache = engine._batch._cache
    if not isinstance(cache, PagedCache):
        return {}
    gib = {"pool_gib": cache.held_bytes, "used_gib": cache.num_bytes}
    return {**{name: round(num / GIB, 3) for name, num in gib.items()}, "pool_moves": cache.num_moves}


def _equal_share(ours: Sequence[TokenOutput], others: Sequence[TokenOutput]) -> float:
    pairs = [
        (a, b) for own, other in zip(ours, others, strict=True)
        for a, b in zip(own.token_ids, other.token_ids, strict=True)
    ]  # fmt: skip
    return round(sum(a == b for a, b in pairs) / len(pairs), 4)


def _log_probs(look: Look, dtype: str, facts: Facts) -> None:
    model = loaded(look, dtype)
    asked = asks(look.size(8, 2), look.size(4, 2), prompt=look.size(64, 8), tokens=look.size(64, 12))
    outputs = outputs_both_ways(look, model, asked, facts)
    rows = make_rows(
        [torch.tensor(ids) for ids, _ in asked], [torch.tensor(output.token_ids) for output in outputs]
    )
    scorer = Engine(model, EngineConfig(), is_frozen=True)
    columns = scorer.map_tokens(rows, lambda tokens: {"log_probs": tokens.log_probs(temperature=1.0)[0]})
    rolled = torch.tensor([value for output in outputs for value in output.log_probs])
    difference = (rolled - columns["log_probs"].float()).abs()
    largest = float(difference.max())
    facts |= {"tokens": len(rolled), "log_prob_mean": round(float(rolled.mean()), 3)}
    facts |= {"difference_max": largest, "difference_mean": float(difference.mean())}
    if not largest <= LIMITS[dtype]:
        raise ValueError(f"a log-prob of the rollout differs by {largest}, more than {LIMITS[dtype]}")


def _greedy(look: Look, dtype: str, facts: Facts) -> None:
    """In bfloat16 random weights part company early: only float32 must agree."""
    count, prompt, tokens = look.size(8, 3), look.size(64, 8), look.size(48, 12)
    asked = asks(count, 1, prompt=prompt, tokens=tokens, temperature=0.0, seed=1)
    ours = [list(out.token_ids) for out in generate(NativeEngine(loaded(look, dtype), max_running=64), asked)]
    plain: Any = AutoModelForCausalLM.from_pretrained(
        model_folder(look), dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    plain = plain.to(look.device).eval()
    ids = torch.tensor(random_prompts(count, prompt, seed=1), device=look.device)
    options = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
    with torch.no_grad():
        rows = plain.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()
    theirs = [row[prompt:] for row in rows]
    pairs = list(zip(ours, theirs, strict=True))
    facts |= {"rows": count, "rows_equal": sum(a == b for a, b in pairs)}
    facts["equal_up_to"] = [
        len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))) for a, b in pairs
    ]
    if dtype == "float32" and facts["rows_equal"] < count:
        raise ValueError(
            f"{count - facts['rows_equal']} of {count} greedy rows differ from those of generate"
        )


def _little_memory(look: Look, facts: Facts) -> None:
    """Sequences that wait for pages give the tokens that they give beside plenty of memory; in float32, since other
    numbers of them run together."""
    model, outputs = loaded(look, "float32"), []
    prompts, samples, prompt, tokens = look.size(8, 2), 4, look.size(128, 40), look.size(160, 40)
    asked = asks(prompts, samples, prompt=prompt, tokens=tokens, seed=2)
    needed = 2 * token_bytes(look) * (prompts * prompt + len(asked) * tokens)
    for name, free_bytes in (("plenty", None), ("little", needed // 2)):
        with _in_pages():
            engine = NativeEngine(model, max_running=64)
        if free_bytes is not None:
            engine._batch.use_memory(free_bytes)
        outputs.append(generate(engine, asked))
        facts[name] = {"preempted": engine._batch.num_preempted, **pages(engine)}
        asyncio.run(engine.close())
    facts["equal_tokens"] = _equal_share(*outputs)
    if not facts["little"]["preempted"]:
        raise RuntimeError("no sequence waited: memory was enough")


@contextlib.contextmanager
def _in_pages() -> Iterator[None]:
    """Engines that are made inside have pages, also in a rehearsal."""
    with (
        mock.patch.object(running, "new_cache", lambda device, capacity: PagedCache(capacity, device)),
        mock.patch.object(batch, "fused_step", return_value=None),
    ):
        yield


def _uncaptured(look: Look, facts: Facts) -> None:
    """A capture that fails must leave everything as it was: the stream, the allocator, the tokens."""
    folder = look.work / "gpt2"
    sizes: dict[str, Any] = {"vocab_size": 200, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    model = load_model(ModelConfig(path=str(folder), dtype="float32"), device=look.device)
    outputs_both_ways(look, model, asks(4, 2, prompt=8, tokens=40), facts)
    weight = next(iter(model.module.parameters()))
    weight.square().mean().backward()  # type: ignore[no-untyped-call]
    if weight.grad is None or not bool(torch.isfinite(weight.grad).all()):
        raise RuntimeError("the backward pass after a failed capture gave no gradient")
