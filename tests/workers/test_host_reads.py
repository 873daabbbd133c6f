"""The host waits for the device once per optimizer step and once per decoded token, packing included.

On a CPU nothing waits, so tensors that would lie on a device are followed (device_reads.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_batches import make_actor, random_batch, totals_of
from critic_batches import make_critic, value_batch
from device_reads import DeviceReads, device_reads
from prm_batches import make_prm, outcome_batch, prm_ref
from torch import Tensor

from references.language_models import save_tiny
from references.token_passes import log_probs_of
from strop.algorithms.config import AlgorithmConfig
from strop.data.sft.config import SftDistillationConfig
from strop.engines import attention, varlen
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.cpu import layers
from strop.engines.micro_batch import pack
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.parallel.offload import HostCopies
from strop.engines.parallel.ulysses import SequenceShard
from strop.engines.training import Engine
from strop.protocol import DataProto, columns
from strop.rollout.native import batch as batch_module
from strop.rollout.native import running, sampling
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.cpu import kernel
from strop.rollout.native.cuda_graph import StaticStep
from strop.rollout.native.paged_cache import PagedCache
from strop.rollout.native.request import Request
from strop.rollout.types import Sampling
from strop.utils.device import sent
from strop.utils.host_copy import HostCopy
from strop.workers.models import TrainedWorker, TrainingInit
from strop.workers.sft import SupervisedWorker

MANY, FEW = 15, 1000
"""Tokens of a micro-batch: for several of them, and for one."""


@pytest.mark.parametrize(
    "read",
    [
        float, bool, Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.nonzero, Tensor.unique,
        lambda x: x.to("cpu"), lambda x: x[x > 0], lambda x: torch.equal(x, x), lambda x: x.masked_select(x > 0),
        lambda x: torch.zeros(1).repeat_interleave(x.long()), lambda x: x.clone().index_put_((x > 0,), x),
    ],
)  # fmt: skip
def test_each_kind_of_read_is_noticed(read: Callable[[Tensor], object]) -> None:
    weight = torch.ones(1)
    with device_reads([weight]) as reads:
        hidden = 2 * weight.view(1, 1) + torch.ones(1)
        read(hidden[0])
        assert reads.count == 1
        read(torch.ones(1))  # in host memory
    assert reads.count == 1


@pytest.mark.parametrize(
    "send",
    [
        lambda x, host: host.to(x), lambda x, host: host.to(x.device, non_blocking=True),
        lambda x, host: host.to(device=x.device), lambda x, host: x.copy_(host), lambda x, host: x[host.long()],
        lambda x, host: x.index_put((host.long(),), x),
    ],
)  # fmt: skip
def test_each_copy_to_the_device_that_is_waited_for_is_noticed(
    send: Callable[[Tensor, Tensor], Tensor],
) -> None:
    weight = torch.ones(1)
    with device_reads([weight]) as reads:
        found = send(2 * weight, torch.zeros(1))
        assert reads.count == 1
        assert reads.has(found)
        send(sent(torch.ones(1), weight.device), sent(torch.zeros(1), weight.device))
    assert reads.count == 1, reads.lines


def test_what_is_not_waited_for_is_no_read_and_a_copy_lies_in_host_memory() -> None:
    weight = torch.ones(3)
    with device_reads([weight]) as reads:
        copy = (2 * weight).to("cpu", non_blocking=True)
        assert copy.tolist() == [2.0, 2.0, 2.0]
        weight[sent(torch.tensor([0, 2]), weight.device)].sum().to(torch.float64)
        early = HostCopy({"twice": 2 * weight})
        assert reads.count == 0
        weight.sum().item()
        assert early.wait()["twice"].tolist() == [2.0, 2.0, 2.0]
        assert reads.count == 1
        assert HostCopy({"twice": 2 * weight}).wait()["twice"].tolist() == [2.0, 2.0, 2.0]
    assert reads.count == 2


def placed(worker: TrainedWorker) -> list[Tensor]:
    """Tensors of the worker's model."""
    module = worker.engine.model.module
    return [*module.parameters(), *module.buffers()]


def reads_of(worker: TrainedWorker, update: Callable[[], object]) -> DeviceReads:
    """Reads of the second update, when the optimizer has its state."""
    update()
    with device_reads(placed(worker)) as reads:
        update()
    return reads


@pytest.mark.parametrize("max_tokens", [FEW, MANY])
@pytest.mark.parametrize(
    "settings",
    [{}, {"use_kl_loss": True, "entropy_coeff": 0.02}, {"policy_loss": "gspo"}],
    ids=["some rows are only measured", "kl-entropy", "a loss of whole rows"],
)
def test_a_policy_update_reads_once(tiny_model: Path, settings: dict[str, Any], max_tokens: int) -> None:
    batch = random_batch()
    actor = make_actor(tiny_model, AlgorithmConfig(**settings), max_tokens=max_tokens)
    reads = reads_of(actor, lambda: actor.update_policy(batch, totals_of(batch)))
    assert reads.count == 1, reads.lines


def test_an_update_of_values_reads_once(tiny_model: Path) -> None:
    batch = value_batch()
    critic = make_critic(tiny_model, AlgorithmConfig(), max_tokens=MANY)
    reads = reads_of(critic, lambda: critic.update_critic(batch, totals_of(batch)))
    assert reads.count == 1, reads.lines


@pytest.mark.parametrize("coef", [0.0, 1.0], ids=["tokens", "a teacher's word"])
def test_a_step_of_fine_tuning_reads_once(tiny_model: Path, coef: float) -> None:
    batch = random_batch()
    mask = batch.tensors()["response_mask"]
    top = [torch.arange(10, 14).repeat(len(row), 1) for row in columns.rows(mask)]
    batch = batch.union(
        DataProto.from_dict(
            {
                "loss_mask": mask,
                "teacher_ids": columns.jagged(top),
                "teacher_logprobs": columns.jagged([torch.full(ids.shape, -2.0) for ids in top]),
            }
        )
    )
    worker = SupervisedWorker(
        ModelConfig(path=str(tiny_model), dtype="float64"),
        EngineConfig(max_tokens_per_device=MANY),
        OptimizerConfig(lr=1e-3),
        TrainingInit(device="cpu", num_updates=10),
        SftDistillationConfig(coef=coef),
    )
    reads = reads_of(worker, lambda: worker.update(batch, totals_of(batch)))
    assert reads.count == 1, reads.lines


def test_an_update_of_a_process_reward_model_reads_once(tiny_model: Path) -> None:
    batch = outcome_batch()
    batch = batch.union(prm_ref(batch, tiny_model)) if "prm_ref_log_prob" not in batch.tensors() else batch
    prm = make_prm(tiny_model, max_tokens=MANY)
    reads = reads_of(prm, lambda: prm._update(batch, totals_of(batch)))
    assert reads.count == 1, reads.lines


def test_process_rewards_of_all_micro_batches_are_waited_for_once(tiny_model: Path) -> None:
    batch = outcome_batch()
    batch = batch.union(prm_ref(batch, tiny_model))
    prm = make_prm(tiny_model, max_tokens=MANY)
    with device_reads(placed(prm)) as reads:
        prm.compute_process_rewards(batch)
    assert reads.count == 1, reads.lines


def test_log_probs_of_all_micro_batches_are_waited_for_once(tiny_model: Path) -> None:
    batch, actor = random_batch(), make_actor(tiny_model, AlgorithmConfig(), max_tokens=MANY)
    with device_reads(placed(actor)) as reads:
        found = actor.compute_log_prob(batch)
    assert reads.count == 1, reads.lines
    assert bool(columns.flat(found.tensors()["old_log_probs"]).isfinite().all())


def test_layers_that_carry_a_state_are_packed_without_a_read(tmp_path: Path) -> None:
    save_tiny("qwen3_5", tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path), dtype="float32"), device="cpu")
    engine = Engine(model, EngineConfig(max_tokens_per_device=MANY), is_frozen=True)
    rows = make_rows([torch.arange(3, 8)] * 3, [torch.arange(n) for n in (4, 7, 2)])
    with device_reads([*model.module.parameters(), *model.module.buffers()]) as reads:
        log_probs_of(engine, rows, temperature=1.0)
    assert reads.count == 1, reads.lines


def test_weights_leave_for_host_memory_and_come_back_without_a_read() -> None:
    weights = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (3, 70_000)]
    before = [weight.clone() for weight in weights]
    copies = HostCopies()
    with device_reads(weights) as reads:
        copies.put(weights)
        assert [weight.untyped_storage().nbytes() for weight in weights] == [0, 0]
        copies.restore()
    assert reads.count == 0, reads.lines
    assert all(torch.equal(*pair) for pair in zip(weights, before, strict=True))


def one_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """varlen_attn from a mask that is computed on the device."""
    at_query, at_key = torch.arange(len(query)), torch.arange(len(key))
    of_query = torch.searchsorted(query_ends, at_query, right=True)  # segment, counted from 1
    of_key = torch.searchsorted(key_ends, at_key, right=True)
    before_end = (query_ends[of_query] - at_query)[:, None] <= (key_ends[of_key] - at_key)[None]
    hidden = (of_query[:, None] != of_key[None]) | ~before_end
    shared = query.shape[1] // key.shape[1]
    keys, values = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query * scale, keys).masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), values)


def test_packing_for_flash_attention_reads_nothing(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: half precision, one call for all segments, and norms that are not those of a CPU."""
    calls = []
    monkeypatch.setattr(layers, "library_for", lambda *states: None)
    monkeypatch.setattr(varlen, "runs_on", lambda device: True)
    monkeypatch.setattr(attention, "runs_on", lambda device: True)
    monkeypatch.setattr(varlen, "flash_attention", lambda: calls.append(1) or one_call)
    batch = random_batch(torch.float32)
    actor = make_actor(tiny_model, AlgorithmConfig(), max_tokens=MANY, dtype="bfloat16")
    reads = reads_of(actor, lambda: actor.update_policy(batch, totals_of(batch)))
    assert reads.count == 1, reads.lines
    assert calls, "the kernel's stand-in was asked"


@pytest.mark.parametrize(
    "axes", [{"sp_size": 2}, {"cp_size": 2}, {"sp_size": 2, "cp_size": 2}], ids=lambda axes: "-".join(axes)
)
def test_a_rank_takes_its_part_of_a_micro_batch_without_a_read(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, axes: dict[str, int]
) -> None:
    """Packing communicates nothing: groups are asked for their ranks alone."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4 if group == "row_group" else 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    groups = {f"{name.removesuffix('_size')}_group" for name in axes} | (
        {"row_group"} if len(axes) > 1 else set()
    )
    parallel: Any = SimpleNamespace(
        **dict.fromkeys(("sp_size", "cp_size", "tp_size"), 1) | axes, tp_mesh=None,
        **{name: name if name in groups else None for name in ("sp_group", "cp_group", "row_group")},
    )  # fmt: skip
    model = load_model(ModelConfig(path=str(tiny_model), dtype="float32"), device="cpu")
    batch = random_batch()
    with device_reads([]) as reads:
        tokens = pack(batch, model, parallel=parallel)
        assert isinstance(tokens.shard, SequenceShard)
        assert reads.has(tokens.hidden_index)
        assert reads.has(tokens.shard.send_index)
    assert reads.count == 0, reads.lines


WAYS = {
    "sampled": {},
    "greedy beside sampled": {"temperature": 0.0},
    "cut by top-p": {"top_p": 0.5},
    "cut by top-k": {"top_k": 5},
    "warmer": {"temperature": 0.7},
}


@pytest.mark.parametrize("reads_behind", [False, True], ids=["at once", "behind"])
@pytest.mark.parametrize("is_static", [False, True], ids=["own pass", "fixed shapes"])
@pytest.mark.parametrize("way", WAYS)
def test_a_decoded_token_of_all_sequences_is_read_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, way: str, is_static: bool, reads_behind: bool
) -> None:
    """As on a GPU, without what is written in C."""
    monkeypatch.setattr(kernel, "sample", lambda *_: None)
    monkeypatch.setattr(running, "new_cache", lambda device, capacity: PagedCache(capacity, device))
    monkeypatch.setattr(batch_module, "fused_step", lambda model: None)
    model = load_model(ModelConfig(path=str(tiny_model), dtype="float32"), device="cpu")
    batch = DecodeBatch(model, max_running=5)
    batch._steps = StaticStep(model, None) if is_static else None
    batch._reads_behind = reads_behind
    ways = [WAYS[way], {}, WAYS[way]]
    batch.waiting.extend(
        Request(f"r{n}", tuple(range(10, 15 + n)), Sampling(key=n, max_tokens=40, **how))
        for n, how in enumerate(ways)
    )
    with torch.no_grad():
        _step(batch)
        tensors = [*model.module.parameters(), *model.module.buffers(), batch._cache.pool, batch._cache.table]  # type: ignore[attr-defined]
        if batch._steps is not None:
            (shape,) = batch._steps._shapes.values()
            tensors += [shape._ids, shape._lengths, shape._positions]
        tensors += [] if batch._unread is None else [batch._unread.tokens]
        with device_reads(tensors) as reads:
            for _ in range(6):
                _step(batch)
    assert reads.count == 6, reads.lines
    assert {len(request.token_ids) for request in batch.running} == {8 - reads_behind}


def _step(batch: DecodeBatch) -> None:
    """A step that a dispatch mode sees, which inference mode hides from it."""
    DecodeBatch.step.__wrapped__(batch, 0)  # type: ignore[attr-defined]


def test_a_vocabulary_over_ranks_picks_rows_without_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    picked = []
    rows = np.zeros(3, dtype=sampling.SEQUENCE)
    rows["temperature"], rows["top_p"], rows["top_k"] = (0.0, 1.0, 1.0), 1.0, (0, 3, 0)

    def pick(logits: Tensor, normalizer: Tensor, some: sampling.Rows, vocabulary: object) -> Tensor:
        picked.append(len(some))
        return logits.argmax(-1)

    class Vocabulary:
        def logsumexp(self, logits: Tensor) -> Tensor:
            return torch.logsumexp(logits, -1)

        def places(self, tokens: Tensor) -> Tensor:
            return tokens

        def at(self, logits: Tensor, places: Tensor) -> Tensor:
            return logits.gather(-1, places)

    for name in ("_likeliest", "_drawn_of_cut", "_drawn"):
        monkeypatch.setattr(sampling, name, pick)
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    with device_reads([logits]) as reads:
        tokens, _ = sampling._over_ranks(logits, rows, Vocabulary())  # type: ignore[arg-type]
    assert reads.count == 0, reads.lines
    assert picked == [1, 1, 1]
    assert torch.equal(tokens, logits.argmax(-1))
