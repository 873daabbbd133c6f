"""Forward and backward passes of packed micro-batches through the stages of a model, by megatron-core's schedules.

Without stages one micro-batch after the other; with them 1F1B, or interleaved 1F1B where each rank has several. Each
micro-batch has its own number of tokens; for interleaved stages, which send lengths in both directions at once and take
one for the other where there are two ranks, padding makes them equal. A function of the tokens is called on the last
stage alone, where hidden states end; what it returned is sent to the others.

Concurrency: all ranks run as many micro-batches, also empty ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from strop.engines.checkpoint_reader import DTYPE_NAMES
from strop.engines.checksum.models import dtype_name
from strop.engines.megatron.model import MegatronModel
from strop.engines.micro_batch import with_shard
from strop.engines.parallel.tensor import tensor_shard
from strop.engines.tokens import Part, Tokens

_EMPTY = torch.zeros((), dtype=torch.int)
_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPE_NAMES}


def run(
    model: MegatronModel,
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Tokens],
    finish: Callable[[Tokens], tuple[Tensor | None, Mapping[str, Tensor]]],
    *,
    trains: bool,
) -> list[dict[str, Tensor]]:
    """Pass micro-batches through the model.

    Args:
        model: parts of this rank.
        chunks: its stages, as they are called.
        micro_batches: of this rank; as many on every one; for interleaved stages `of_one_length`.
        finish: called on the last stage with the tokens of each, in order: what its gradient is of, and tensors in host
            memory.
        trains: run the backward pass.

    Returns:
        The tensors, on every rank.
    """
    is_interleaved = model.config.virtual_pipeline_model_parallel_size is not None
    first: Any = micro_batches[0]
    length = first.shard.input_ids.shape[1] if is_interleaved else 1

    def forward(queue: Iterator[Tokens], stage: Any) -> tuple[Tensor, Any]:
        tokens = next(queue)
        part: Any = tokens if tokens.shard is None else tokens.shard
        row = model.row(part.position_ids, part.attention, tokens.routing)
        hidden = stage(part.input_ids, part.position_ids, row)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
            hidden = output[:, 0]
            known = (
                F.embedding(tokens.hidden_index, hidden) if tokens.shard is None else part.predicting(hidden)
            )
            value, result = finish(dataclasses.replace(tokens, predicting=known))
            return output.new_zeros(()) if value is None else value, _EMPTY.clone(), result

        return hidden, loss

    results: list[Mapping[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=length,  # not read where each has its own
        micro_batch_size=1,
        forward_only=not trains,
    )
    return from_last_stage(results)


def of_one_length(model: MegatronModel, micro_batches: Sequence[Tokens]) -> list[Tokens]:
    """Micro-batches with padding up to the longest of them, shared out over tensor-parallel ranks."""
    length = max(tokens.num_tokens for tokens in micro_batches)
    length += -length % model.config.tensor_model_parallel_size
    return [_padded(tokens, length) for tokens in micro_batches]


def _padded(tokens: Tokens, length: int) -> Tokens:
    """The tokens with padding behind them up to this length, shared out over tensor-parallel ranks."""
    group = parallel_state.get_tensor_model_parallel_group()

    def part_of(tokens: Tokens) -> Part:
        return tensor_shard(
            input_ids=tokens.input_ids,
            position_ids=tokens.position_ids,
            attention=tokens.attention,
            hidden_index=tokens.hidden_index,
            targets=tokens.targets,
            group=group,
            key_heads=None,
            length=length,
        )

    return with_shard(tokens, part_of, group)


def from_last_stage(results: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Tensors in host memory of the last stage, by their names, on all stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if dist.get_world_size(group) == 1:
        return [dict(result) for result in results]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    forms = [
        [[name, list(values.shape), dtype_name(values.dtype)] for name, values in result.items()]
        for result in results
    ]
    text = torch.frombuffer(bytearray(json.dumps(forms).encode()), dtype=torch.uint8)
    size = torch.tensor(len(text))
    dist.broadcast(size, src=last, group=group)
    is_last = dist.get_rank() == last
    text = text if is_last else text.new_empty(int(size))
    dist.broadcast(text, src=last, group=group)
    shared: list[dict[str, Tensor]] = []
    for number, of_result in enumerate(json.loads(bytes(text.tolist()))):
        shared.append({})
        for name, shape, dtype in of_result:
            values = (
                results[number][name].contiguous() if is_last else torch.empty(shape, dtype=_DTYPES[dtype])
            )
            dist.broadcast(values, src=last, group=group)
            shared[-1][name] = values
    return shared
