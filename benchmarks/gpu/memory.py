"""Step memory: memory that roles hand over, and the sentence a person reads when there is none."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.look import Facts, Look
from benchmarks.gpu.timing import GIB, peak_gib, seconds
from benchmarks.gpu.workload import (
    asks,
    generate,
    loaded,
    make_actor,
    num_parameters,
    training_words,
    update_batch,
)
from strop.cli.main import main
from strop.rollout.native.engine import NativeEngine

SETTINGS = ("actor.engine.max_tokens_per_device", "model.gradient_checkpointing", "rollout.max_running")
"""What a person may change where memory ends."""
UPDATE_GIB = 12
"""Enough for the model, its gradient and its optimizer, and too little for the activations of the default budget."""


def memory(look: Look) -> None:
    """Offload and restore, the engine's sleep, and the end of memory."""
    look.measure("weights that are not trained", lambda facts: _frozen(look, facts))
    look.measure("offload of the policy and back", lambda facts: _offload(look, facts))
    look.measure("activations on the host", lambda facts: _activations(look, facts), needs_s=6)
    look.measure("sleep of the engine", lambda facts: _sleep(look, facts))
    if look.is_rehearsal:
        look.skip("out of memory", "only on a card")
        return
    for what, gib in (("update", UPDATE_GIB), ("loading", 2)):
        look.measure(
            f"out of memory in {what}",
            partial(_out_of_memory, look, what, gib),
            needs_s=12,
        )


def _held(look: Look) -> dict[str, float]:
    """GiB of the device that this process holds."""
    if look.device != "cuda":
        return {}
    look.sync()
    return {
        "allocated": round(torch.cuda.memory_allocated() / GIB, 3),
        "reserved": round(torch.cuda.memory_reserved() / GIB, 3),
    }


def _frozen(look: Look, facts: Facts) -> None:
    """The model as a reference holds it, beside float32."""
    for name, holds_half in (("wide", False), ("half", True)):
        before = _held(look).get("allocated", 0.0)
        model = loaded(look, "bfloat16", holds_half=holds_half)
        facts[f"{name}_gib"] = round(_held(look).get("allocated", 0.0) - before, 3)
        facts[f"{name}_dtypes"] = sorted({str(weight.dtype) for weight in model.module.parameters()})
        del model
        look.clean()


def _activations(look: Look, facts: Facts) -> None:
    """An update whose activations wait for the backward pass in host memory, beside one where they stay."""
    batch, totals = update_batch(look, look.size(2, 1), 4, look.size(256, 8), look.size(768, 16))
    for name, on_host in (("here", False), ("on_host", True)):
        actor = make_actor(look, offload_activations=on_host)
        update = partial(actor.update_policy, batch, totals)
        update()
        look.clean()
        facts[f"{name}_s"] = round(seconds(look, update, warm=0), 3)
        facts |= {f"{name}_{key}": value for key, value in peak_gib(look).items()}
        del actor, update
        look.clean()


def _offload(look: Look, facts: Facts) -> None:
    actor = make_actor(look)
    engine: Any = actor.engine  # of torch, which has the optimizer apart
    batch, totals = update_batch(look, 2, 2, look.size(64, 8), look.size(64, 8))
    facts["weights_gib"] = round(4 * num_parameters(look) / GIB, 3)
    actor.update_policy(batch, totals)
    facts["after_update"] = _held(look)
    for turn in ("first", "second"):
        facts[f"offload_s_{turn}"] = round(seconds(look, actor.offload, warm=0), 3)
        facts[f"offloaded_{turn}"] = _held(look)
        facts[f"restore_s_{turn}"] = round(seconds(look, actor.engine.load_to_device, warm=0), 3)
        facts[f"restore_optimizer_s_{turn}"] = round(seconds(look, lambda: engine.optimizer, warm=0), 3)
    facts["back"] = _held(look)
    actor.update_policy(batch, totals)


def _sleep(look: Look, facts: Facts) -> None:
    engine = NativeEngine(loaded(look, "bfloat16"), max_running=look.size(64, 4))
    facts["before"] = _held(look)
    generate(engine, asks(8, look.size(8, 1), prompt=look.size(128, 8), tokens=look.size(100, 12)))
    facts |= {"awake": _held(look), "cache_gib": round(engine._batch.cache_bytes / GIB, 3)}
    asyncio.run(engine.sleep())
    facts["asleep"] = _held(look)
    look.clean()
    facts["asleep_and_emptied"] = _held(look)


def _out_of_memory(look: Look, what: str, gib: int, facts: Facts) -> None:
    """A run that may use so many GiB."""
    total = torch.cuda.get_device_properties(0).total_memory
    words = training_words(look, look.work / "memory", steps=1, name=what, max_tokens=256)
    said = io.StringIO()
    torch.cuda.set_per_process_memory_fraction(gib * GIB / total)
    try:
        with contextlib.redirect_stderr(said):
            facts["exit"] = main(words)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        print(said.getvalue()[-6000:])
    facts["last"] = said.getvalue().strip().splitlines()[-3:]
    if gib == UPDATE_GIB:
        log = look.work / "memory" / what / "events.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
        events = [event for event in map(json.loads, lines) if event["kind"] == "out_of_memory"]
        facts["held_tokens"] = [event["held"] for event in events]
        check_lowered(facts["exit"], said.getvalue(), facts["held_tokens"])
    else:
        check_sentence(facts["exit"], said.getvalue())


def check_lowered(code: int, said: str, held: Sequence[int]) -> None:
    """Refuse a run whose update lacked memory, and that neither went on with smaller micro-batches nor said why not."""
    if code == 0 and not held:
        raise RuntimeError("the run ended well: its memory was enough, and no token budget was lowered")
    if "Traceback" in said:
        raise RuntimeError("a person reads a traceback where memory ends")
    if code and "engine.max_tokens_per_device of this role" not in said:
        raise RuntimeError("the sentence does not name engine.max_tokens_per_device of the role")


def check_sentence(code: int, said: str) -> None:
    """Refuse what a run that should lack memory has said, where it did not, or where it leaves a person alone."""
    if code == 0:
        raise RuntimeError("the run ended well: its memory was enough, and no sentence was seen")
    if "Traceback" in said:
        raise RuntimeError("a person reads a traceback where memory ends")
    if missing := [name for name in SETTINGS if name not in said]:
        raise RuntimeError(f"the sentence does not name {', '.join(missing)}")
