"""Step compile: layers that torch.compile has made a function of, and a model that is sharded over one rank (FSDP2),
both beside the same update without."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters

from benchmarks.gpu.look import Facts, Look
from benchmarks.gpu.profiling import profiled, waits_by_line
from benchmarks.gpu.timing import peak_gib, seconds
from benchmarks.gpu.workload import make_actor, model_folder, update_batch
from strop.controller.store_server import RendezvousServer
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.kinds import TrainableEngine, train_engine
from strop.engines.model import load_model
from strop.engines.parallel.process_group import joined, leave_ranks
from strop.engines.parallel.ranks import Parallel, alone
from strop.protocol import DataProto, columns

MAX_DIFFERENCE = 0.3
"""Of a log-prob near 12 in bfloat16: rounding in other places."""


def compiled(look: Look) -> None:
    """Compare log-probs, and time updates; this step runs beside others, so its times are for each other alone."""
    look.measure("compiled layers", lambda facts: _compiled(look, facts), needs_s=30)
    look.measure("sharded over one rank", lambda facts: _sharded(look, facts), needs_s=20)


def _compiled(look: Look, facts: Facts) -> None:
    """Rows of two packings: functions that the second one needs were not general enough."""
    first, totals = update_batch(look, look.size(4, 2), 4, look.size(128, 8), look.size(384, 24))
    other, other_totals = update_batch(look, look.size(3, 2), 2, look.size(96, 6), look.size(200, 12))
    log_probs = []
    for is_compiled in (False, True):
        with _quick_compiler(look):
            actor = make_actor(look, compile=is_compiled)
        name = "compiled" if is_compiled else "plain"
        counters.clear()
        log_probs.append(columns.flat(actor.compute_log_prob(first).tensors()["old_log_probs"]))
        update = functools.partial(actor.update_policy, first, totals)
        facts[f"{name}_first_s"] = round(seconds(look, update, warm=0), 3)
        facts[f"{name}_s"] = round(seconds(look, update, warm=1), 3)
        if is_compiled:
            facts["functions"] = counters["stats"]["unique_graphs"]
            facts["graph_breaks"] = sum(counters["graph_break"].values())
            actor.compute_log_prob(other)
            actor.update_policy(other, other_totals)
            facts["functions_of_other_rows"] = counters["stats"]["unique_graphs"] - facts["functions"]
        facts |= {f"{name}_{key}": value for key, value in peak_gib(look).items()}
        del actor, update
        look.clean()
    _check_difference(facts, *log_probs)
    if facts["functions_of_other_rows"]:
        raise RuntimeError("rows of another packing needed functions of their own")


def _quick_compiler(look: Look) -> Any:
    """In a rehearsal functions are traced and not compiled."""
    traced = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    usual = torch.nn.Module.compile
    return mock.patch.object(torch.nn.Module, "compile", traced if look.is_rehearsal else usual)


def _sharded(look: Look, facts: Facts) -> None:
    """Every hook of FSDP2, its casts and gathers ahead, with nobody to talk to."""
    batch, _ = update_batch(look, look.size(4, 2), 4, look.size(128, 8), look.size(384, 24))
    server = RendezvousServer("127.0.0.1")
    device = torch.device(look.device, 0) if look.device == "cuda" else torch.device(look.device)
    log_probs = []
    try:
        one_rank = joined(
            rank=0,
            world_size=1,
            rendezvous=server.rendezvous,
            device=device,
            engine=EngineConfig(),
            timeout_s=60,
        )
        for name, parallel in (("whole", alone(device)), ("sharded", one_rank)):
            engine = _engine(look, parallel)
            log_probs.append(
                engine.map_tokens(batch, lambda tokens: {"all": tokens.log_probs(temperature=1.0)[0]})["all"]
            )
            update = functools.partial(_update, engine, batch)
            facts[f"{name}_s"] = round(seconds(look, update, warm=2), 3)
            facts |= {f"{name}_{key}": value for key, value in peak_gib(look).items()}
            if parallel is one_rank:
                facts["profile"] = profiled(look, update, top=6)
                facts["waits"] = waits_by_line(look, update)
            del engine, update
            look.clean()
    finally:
        leave_ranks()
        server.close()
    _check_difference(facts, *log_probs)


def _engine(look: Look, parallel: Parallel) -> TrainableEngine:
    model = load_model(
        ModelConfig(path=str(model_folder(look)), dtype="bfloat16"), device=look.device,
        parallel=None if parallel.mesh is None else parallel,
    )  # fmt: skip
    optim = OptimizerConfig(lr=1e-6)
    return train_engine(model, EngineConfig(), optim, total_steps=10, parallel=parallel)


def _update(engine: TrainableEngine, batch: DataProto) -> None:
    engine.accumulate(batch, lambda tokens: -tokens.log_probs(temperature=1.0)[0].mean())
    engine.step()


def _check_difference(facts: Facts, one: torch.Tensor, other: torch.Tensor) -> None:
    facts["difference_max"] = float((one.float() - other.float()).abs().max())
    if not facts["difference_max"] <= MAX_DIFFERENCE:
        raise ValueError(f"a log-prob differs by {facts['difference_max']}, more than {MAX_DIFFERENCE}")
