"""Step update: tokens per second of a policy update beside a padded loop of transformers and torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from benchmarks.gpu.look import Facts, Look
from benchmarks.gpu.profiling import profiled, waits_by_line
from benchmarks.gpu.timing import peak_gib, seconds
from benchmarks.gpu.workload import (
    make_actor,
    model_folder,
    num_parameters,
    random_prompts,
    shape,
    update_batch,
)
from strop.algorithms.aggregation import BatchTotals
from strop.protocol import DataProto
from strop.workers.actor import ActorWorker

MICRO_BATCHES = (16384, 8192, 4096)
"""Tokens per micro-batch that are tried, the first that fits."""


def update(look: Look) -> None:
    """Rows of 1,024 tokens: prompts of 256 and responses of 768."""
    rows, few = look.size(64, 8), look.size(16, 4)
    prompt, response = _lengths(look)
    apart, shared = (
        update_batch(look, rows, 1, prompt, response),
        update_batch(look, rows // 4, 4, prompt, response),
    )
    profiled_rows = update_batch(look, few // 4, 4, prompt, response)
    look.measure(
        f"{rows} rows of {prompt + response} tokens, prompts apart",
        lambda facts: _rows(look, *apart, facts, passes=True),
        needs_s=15,
    )
    look.measure(
        f"{rows} rows of {prompt + response} tokens, groups of 4 that share a prompt",
        lambda facts: _rows(look, *shared, facts),
        needs_s=12,
    )
    look.measure(
        "padded loop of transformers and torch", lambda facts: _padded(look, rows, facts), needs_s=15
    )
    look.measure(f"{few} rows, profiled", lambda facts: _profile(look, *profiled_rows, facts), needs_s=12)
    look.measure(
        f"{few} rows, gradient checkpointing",
        lambda facts: _rows(look, *profiled_rows, facts, checkpointing=True),
        needs_s=10,
    )


def _lengths(look: Look) -> tuple[int, int]:
    return look.size(256, 8), look.size(768, 24)


def _note_rate(look: Look, facts: Facts, taken: float, tokens: int) -> None:
    """Tokens per second, and 6 operations per weight and token over the measured matrix rate; shared prompts counted
    as if they were computed for each row."""
    operations = 6 * num_parameters(look) * tokens
    facts |= {"s": round(taken, 3), "tokens_per_s": round(tokens / taken), **peak_gib(look)}
    facts["mfu"] = round(operations / taken / (1e12 * look.ceilings(facts)["bf16_tflops"]), 4)


def _rows(
    look: Look,
    batch: DataProto,
    totals: BatchTotals,
    facts: Facts,
    *,
    checkpointing: bool = False,
    passes: bool = False,
) -> None:
    """The second update of a policy, with smaller micro-batches where the usual ones do not fit."""
    tokens = len(batch) * sum(_lengths(look))
    for size in MICRO_BATCHES:
        actor = make_actor(look, checkpointing=checkpointing, max_tokens=size)
        facts["micro_batch_tokens"] = size
        try:
            _note_rate(look, facts, seconds(look, lambda: actor.update_policy(batch, totals)), tokens)  # noqa: B023
        except torch.OutOfMemoryError as error:
            facts[f"out_of_memory_at_{size}"] = str(error)[:160]
            del actor
            look.clean()
            continue
        if passes:
            facts["log_prob_pass_s"] = round(seconds(look, lambda: actor.compute_log_prob(batch)), 3)  # noqa: B023
            facts["phases_s"] = _phases(look, actor, batch, totals)
        return
    raise MemoryError(f"an update does not fit with micro-batches of {MICRO_BATCHES[-1]} tokens either")


def _phases(look: Look, actor: ActorWorker, batch: DataProto, totals: BatchTotals) -> Facts:
    """Seconds of passes forward and backward, and of the optimizer step."""
    found: Facts = {}
    accumulate, step = actor.engine.accumulate, actor.engine.step

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            results = []
            taken = seconds(look, lambda: results.append(function(*args, **kwargs)), warm=0)
            found[name] = round(taken, 3)
            return results[0]

        return call

    engine: Any = actor.engine
    engine.accumulate, engine.step = timed("passes", accumulate), timed("optimizer", step)
    try:
        actor.update_policy(batch, totals)
    finally:
        del engine.accumulate, engine.step
    return found


def _profile(look: Look, batch: DataProto, totals: BatchTotals, facts: Facts) -> None:
    actor = make_actor(look)
    for _ in range(2):
        actor.update_policy(batch, totals)
    facts["profile"] = profiled(look, lambda: actor.update_policy(batch, totals))
    facts["waits"] = waits_by_line(look, lambda: actor.update_policy(batch, totals))


def _padded(look: Look, rows: int, facts: Facts) -> None:
    """Float32 weights under autocast, whole logits, fused AdamW: a script without a library."""
    prompt, response = _lengths(look)
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_folder(look), dtype=torch.float32, attn_implementation="sdpa"
    )
    model = model.to(look.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    answers = torch.randint(10, shape(look)["vocab_size"], (rows, response))
    ids = torch.cat([torch.tensor(random_prompts(rows, prompt)), answers], dim=1).to(look.device)
    advantages, size = torch.randn(rows, 1, device=look.device), look.size(8, 2)

    def step() -> None:
        for begin in range(0, rows, size):
            some = ids[begin : begin + size]
            with torch.autocast(look.device, dtype=torch.bfloat16):
                logits = model(some, use_cache=False).logits[:, prompt - 1 : -1]
            log_probs = -F.cross_entropy(logits.float().transpose(1, 2), some[:, prompt:], reduction="none")
            ratio = torch.exp(log_probs - log_probs.detach())
            loss = -(ratio * advantages[begin : begin + size]).sum() / (rows * response)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    _note_rate(look, facts, seconds(look, step), rows * (prompt + response))
