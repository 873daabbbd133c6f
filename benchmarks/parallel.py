"""Parallel plans beside one process: the same optimizer step, its time, and the bytes that a rank sends.

    make bench BENCH=parallel ARGS=--json

prints one JSON line; without `--json` a line per plan before it. A tiny dense model and one with experts take a step of
a policy loss and of a value loss in one process, and on 2 to 8 processes over gloo in each plan, in float64. Compared
are loss, norm of the gradient and updated weights, and the bytes that the collectives send (sent_bytes.py) with those
of the formulas (traffic.py). A plan that a model does not go with is left out, with the sentence that refuses it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from machine import machine
from sent_bytes import sent_bytes
from torch import Tensor
from traffic import MicroBatchSize, Shape, TrafficModel, TrafficPlan, step_traffic

from strop.controller.rendezvous import Rendezvous
from strop.controller.store_server import RendezvousServer
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.parallel.axes import check_axes
from strop.engines.parallel.context import ContextTensorShard
from strop.engines.parallel.model_axes import check_model_axes
from strop.engines.parallel.pipeline import whole_weight
from strop.engines.parallel.process_group import join_ranks, leave_ranks
from strop.engines.parallel.stages import stage_layers
from strop.engines.parallel.ulysses import SequenceShard
from strop.engines.tokens import Part, Tokens
from strop.engines.training import TrainEngine
from strop.engines.value_models import load_value_model

VOCAB = 199
MAX_TOKENS = 256
"""Longest row of a rank; two or three micro-batches."""
PLANS: dict[str, tuple[dict[str, int], int]] = {
    "1": ({}, 1),
    "dp2": ({}, 2),
    "tp2": ({"tensor_parallel": 2}, 2),
    "sp2": ({"sequence_parallel": 2}, 2),
    "cp2": ({"context_parallel": 2}, 2),
    "ep2": ({"expert_parallel": 2}, 2),
    "pp2": ({"pipeline_parallel": 2}, 2),
    "tp2xdp2": ({"tensor_parallel": 2}, 4),
    "cp2xdp2": ({"context_parallel": 2}, 4),
    "cp2xtp2": ({"context_parallel": 2, "tensor_parallel": 2}, 4),
    "cp2xsp2": ({"context_parallel": 2, "sequence_parallel": 2}, 4),
    "tp2xpp2": ({"tensor_parallel": 2, "pipeline_parallel": 2}, 4),
    "ep2xdp2": ({"expert_parallel": 2}, 4),
    "ep2xtp2": ({"expert_parallel": 2, "tensor_parallel": 2}, 4),
    "ep2xpp2": ({"expert_parallel": 2, "pipeline_parallel": 2}, 4),
    "cp2xpp2": ({"context_parallel": 2, "pipeline_parallel": 2}, 4),
    "sp2xpp2": ({"sequence_parallel": 2, "pipeline_parallel": 2}, 4),
    "pp4": ({"pipeline_parallel": 4}, 4),
    "tp2xpp2xdp2": ({"tensor_parallel": 2, "pipeline_parallel": 2}, 8),
}
"""Axes of an engine, and processes; those that the axes leave have rows of their own."""
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A step of a model in a plan."""

    folder: str
    values: bool
    axes: dict[str, int]
    num_ranks: int

    @property
    def ranks_of_stage(self) -> int:
        """Ranks that have the same layers."""
        return self.num_ranks // self.axes.get("pipeline_parallel", 1)

    @property
    def ranks_per_row(self) -> int:
        """Of these, ranks that have the same rows."""
        return math.prod(self.axes.get(f"{name}_parallel", 1) for name in ("tensor", "sequence", "context"))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a rank saw."""

    loss: float
    """Of its rows; ranks that share rows see the same."""
    grad_norm: float
    weights: dict[str, Tensor]
    batches: tuple[MicroBatchSize, ...]
    sent: float
    """Bytes, of one step."""
    seconds: float
    """Of another one, uncounted."""
    processor_s: float
    """Of that one, of this rank."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line in place of a line per plan")
    arguments = parser.parse_args()
    where = machine()
    report: dict[str, Any] = {"plans": {}, "skipped": {}}
    differences: dict[str, list[float]] = {"loss": [], "grad_norm": [], "weight": []}
    traffic_errors: list[float] = []
    with tempfile.TemporaryDirectory() as folder, Ranks(max(num for _, num in PLANS.values())) as ranks:
        for model, values, path in _models(Path(folder)):
            shapes = _shapes(path, values)
            alone: list[Result] | None = None
            for plan, (axes, num_ranks) in PLANS.items():
                name = f"{model} {plan}"
                if reason := _refusal(path, axes, num_ranks):
                    report["skipped"][name] = reason
                    continue
                job = Job(folder=str(path), values=values, axes=axes, num_ranks=num_ranks)
                results = ranks.run(job)
                alone = alone or results
                for what, difference in _differences(results, alone[0], job).items():
                    differences[what].append(difference)
                predicted = [_predicted(path, shapes, job, results, rank) for rank in range(num_ranks)]
                errors = [
                    abs(one.sent - of) / max(of, 1.0) for one, of in zip(results, predicted, strict=True)
                ]
                traffic_errors += errors
                report["plans"][name] = {
                    "seconds": round(max(one.seconds for one in results), 3),
                    "sent_bytes": max(one.sent for one in results),
                    "predicted_bytes": max(predicted),
                    "traffic_error": round(max(errors), 4),
                }
                if not arguments.json:
                    print(f"{name:24}{report['plans'][name]}")
    summary = {f"max_{what}_difference": max(found) for what, found in differences.items()}
    print(
        json.dumps({"name": "parallel", **summary, "traffic_error": max(traffic_errors), **report, **where})
    )


def _models(folder: Path) -> Iterator[tuple[str, bool, Path]]:
    """Name, whether it is a value model, and folder of each."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 256,
        "pad_token_id": 0,
    }  # fmt: skip
    dense = transformers.Qwen3Config(**shape)
    experts = transformers.Qwen3MoeConfig(
        **shape, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    )
    for name, config in (("dense", dense), ("moe", experts)):
        config.num_labels = 1
        for values in (False, True):
            kind = (
                transformers.AutoModelForSequenceClassification
                if values
                else transformers.AutoModelForCausalLM
            )
            torch.manual_seed(0)
            path = folder / f"{name}-{'values' if values else 'policy'}"
            kind.from_config(config).save_pretrained(path)
            yield path.name, values, path


def _refusal(path: Path, axes: Mapping[str, int], num_ranks: int) -> str:
    """Why a model does not go with a plan; empty where it does."""
    config = transformers.AutoConfig.from_pretrained(path)
    engine = EngineConfig(**axes)
    try:
        check_axes(engine, num_ranks)
        check_model_axes(config, engine, num_ranks)
    except ValueError as error:
        return str(error)
    return ""


def _differences(results: Sequence[Result], alone: Result, job: Job) -> dict[str, float]:
    """Largest differences from one process, relative where a number is above 1."""
    loss = sum(one.loss for one in results[: job.ranks_of_stage : job.ranks_per_row])
    return {
        "loss": abs(loss - alone.loss) / max(1.0, abs(alone.loss)),
        "grad_norm": max(abs(one.grad_norm - alone.grad_norm) for one in results) / max(1.0, alone.grad_norm),
        "weight": max(
            float((one.weights[name] - weight).abs().max())
            for one in results
            for name, weight in alone.weights.items()
        ),
    }


def _shapes(path: Path, values: bool) -> dict[str, Shape]:
    """Of all parameters, tied ones once."""
    load = load_value_model if values else load_model
    model = load(ModelConfig(path=str(path), dtype="float64"), device="cpu")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _predicted(
    path: Path, shapes: Mapping[str, Shape], job: Job, results: Sequence[Result], rank: int
) -> float:
    """Bytes that a rank sends in a step, by the formulas."""
    config = transformers.AutoConfig.from_pretrained(path)
    engine = EngineConfig(**job.axes)
    last_stage = results[-job.ranks_of_stage :]  # where tokens are asked for what they predict
    batches = last_stage[rank % job.ranks_of_stage].batches
    if engine.expert_parallel > 1:
        routed = [
            sum(batch.num_tokens for batch in same) / len(same)
            for same in zip(*(one.batches for one in last_stage), strict=True)
        ]
        batches = tuple(
            dataclasses.replace(batch, num_routed=mean) for batch, mean in zip(batches, routed, strict=True)
        )
    num_stages = engine.pipeline_parallel
    plan = TrafficPlan(
        shards=job.ranks_of_stage // engine.tensor_parallel,
        tensor=engine.tensor_parallel,
        sequence=engine.sequence_parallel,
        context=engine.context_parallel,
        experts=engine.expert_parallel,
        stage_layers=tuple(len(layers) for layers in stage_layers(config.num_hidden_layers, num_stages)),
        stage=rank // job.ranks_of_stage,
        activation_bytes=8,
        gradient_bytes=8,
        result_bytes=8,
        is_value_model=job.values,
    )
    return step_traffic(_traffic_model(config, shapes, engine.tensor_parallel), plan, batches).total


def _traffic_model(config: Any, shapes: Mapping[str, Shape], tensor: int) -> TrafficModel:
    """What traffic depends on of the model, for so many tensor-parallel ranks."""
    parts: dict[str, list[Shape]] = {
        "layer_cut": [], "layer_whole": [], "embedding": [], "head": [], "norm": [], "experts": [],
    }  # fmt: skip
    for name, shape in shapes.items():
        cut = _cut(name, shape, tensor)
        if ".experts." in name:
            part = "experts"
        elif ".layers." in name:
            part = "layer_whole" if cut == shape and tensor > 1 else "layer_cut"
        else:
            part = {"embed_tokens": "embedding", "lm_head": "head"}.get(name.split(".")[-2], "norm")
        if ".layers." not in name or ".layers.0." in name:
            parts[part].append(cut)
    return TrafficModel(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        key_dim=config.head_dim,
        value_dim=config.head_dim,
        experts_per_token=getattr(config, "num_experts_per_tok", 0),
        **{name: tuple(found) for name, found in parts.items()},
    )


def _cut(name: str, shape: Shape, ranks: int) -> Shape:
    """What a tensor-parallel rank has of a parameter."""
    if ".experts." in name:
        return shape
    if any(f"{part}.weight" in name for part in _BY_ROWS):
        return (math.ceil(shape[0] / ranks), *shape[1:])
    if any(f"{part}.weight" in name for part in _BY_COLUMNS):
        return (shape[0], shape[1] // ranks)
    return shape


class Ranks:
    """Processes that take steps together."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()

    def run(self, job: Job) -> list[Result]:
        """The results of the ranks of a plan."""
        server = RendezvousServer("127.0.0.1")
        try:
            used = self._pipes[: job.num_ranks]
            for pipe in used:
                pipe.send((job, server.rendezvous))
            results = []
            for rank, pipe in enumerate(used):
                if not pipe.poll(300):
                    raise TimeoutError(f"rank {rank} of {job} gave no result within 300 s")
                results.append(pipe.recv())
            return results
        finally:
            server.close()


def _serve(pipe: Connection, rank: int) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    while (given := pipe.recv()) is not None:
        job, rendezvous = given
        pipe.send(_step(job, rank, rendezvous))
        leave_ranks()


def _step(job: Job, rank: int, rendezvous: Rendezvous) -> Result:
    """One counted step, and one timed step."""
    engine_config = EngineConfig(max_tokens_per_device=MAX_TOKENS, **job.axes)
    parallel = join_ranks(
        rank=rank, world_size=job.num_ranks, rendezvous=rendezvous, device="cpu", engine=engine_config,
        timeout_s=120.0,
    )  # fmt: skip
    load = load_value_model if job.values else load_model
    model = load(ModelConfig(path=job.folder, dtype="float64"), parallel=parallel)
    engine = TrainEngine(
        model, engine_config, OptimizerConfig(lr=1e-2, eps=1e-2), total_steps=None, parallel=parallel
    )
    pairs = _pairs()
    share = range(parallel.dp_rank, len(pairs), parallel.dp_size)
    rows = make_rows([pairs[i][0] for i in share], [pairs[i][1] for i in share])
    batches: list[MicroBatchSize] = []

    def loss(tokens: Tokens) -> Tensor:
        batches.append(  # on the last stage alone of all micro-batches
            MicroBatchSize(
                num_tokens=tokens.num_tokens,
                num_predicted=int(tokens.targets.numel()),
                num_moved=_num_moved(tokens.shard),
            )
        )
        if job.values:
            return ((tokens.values() - 0.5) ** 2).sum() / 500
        log_probs, entropies = tokens.log_probs(temperature=0.9)
        return (0.3 * torch.exp(log_probs) - log_probs - 0.01 * entropies).sum() / 500

    with sent_bytes() as counted:
        value = float(engine.accumulate(rows, loss))
        report = engine.step()
    weights = {
        name: whole_weight(engine.model.module, name, parameter, parameter.dtype).clone()
        for name, parameter in engine.model.named_parameters()
    }
    sizes = tuple(batches)
    start, worked = time.perf_counter(), time.process_time()
    engine.accumulate(rows, loss)
    engine.step()
    return Result(
        loss=value,
        grad_norm=report.grad_norm,
        weights=weights,
        batches=sizes,
        sent=counted.total,
        seconds=time.perf_counter() - start,
        processor_s=time.process_time() - worked,
    )


def _num_moved(shard: Part | None) -> float | None:
    """As of MicroBatchSize; None where the ranks of a row do not divide its tokens for the head."""
    row = shard.row if isinstance(shard, ContextTensorShard) else shard
    if not isinstance(row, SequenceShard):
        return None
    rank = dist.get_rank(row.group)
    both = (*enumerate(row.send_counts), *enumerate(row.receive_counts))
    return sum(count for other, count in both if other != rank) / 2


def _pairs() -> list[tuple[Tensor, Tensor]]:
    """Prompt and response of 16 rows: four samples of each of four prompts."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for prompt_length in (40, 12, 64, 25):
        prompt = torch.randint(2, VOCAB, (prompt_length,), generator=generator)
        for response_length in torch.randint(8, 90, (4,), generator=generator).tolist():
            pairs.append((prompt, torch.randint(2, VOCAB, (response_length,), generator=generator)))
    return pairs


if __name__ == "__main__":
    main()
