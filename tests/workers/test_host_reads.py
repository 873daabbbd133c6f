"""On a CUDA device every path runs, in the precision of its kernels, and the host waits for the device once per
optimizer step and once per decoded token, packing included.

The device computes nothing (fake_card.py), and is that of a process of its own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_batches import make_actor, random_batch, totals_of
from critic_batches import make_critic, value_batch
from default_cases import by_default
from fake_card import DEVICE, Card, card_process
from prm_batches import make_prm, outcome_batch, prm_ref
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)

from references.language_models import save_tiny
from references.token_passes import log_probs_of, of_log_probs
from strop.algorithms.config import AlgorithmConfig
from strop.data.sft.config import SftDistillationConfig
from strop.data.tiny_model import make_tiny_model
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, MoEConfig, OptimizerConfig
from strop.engines.kinds import frozen_engine, train_engine
from strop.engines.micro_batch import pack
from strop.engines.model import load_model
from strop.engines.packing import make_rows, micro_batches
from strop.engines.parallel.ranks import alone
from strop.engines.parallel.ulysses import SequenceShard
from strop.protocol import DataProto, columns
from strop.rollout.native import cuda_graph, decode_kernel, sampling
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.cuda_graph import StaticStep
from strop.rollout.native.fused_layers import fused_layers
from strop.rollout.native.half_copy import HalfCopy
from strop.rollout.native.paged_cache import PagedCache
from strop.rollout.native.request import Request
from strop.rollout.types import Sampling
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.stream import parameter_stream
from strop.utils.device import sent
from strop.utils.host_copy import HostCopy
from strop.workers.models import TrainingInit
from strop.workers.sft import SupervisedWorker

MANY, FEW = 22, 1000
"""Tokens of a micro-batch: for two of them, and for one."""
Waits = Counter[str]
"""Waits by line of strop."""


OnCard = Callable[..., Any]
"""Calls a function of a card and other arguments, in a process that has one."""


@pytest.fixture(scope="module")
def on_card() -> Iterator[OnCard]:
    with card_process() as call:
        yield call


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen3 model of one layer: each operation of the device takes Python a while."""
    folder = tmp_path_factory.mktemp("small") / "model"
    sizes = {"hidden_size": 32, "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 64}
    make_tiny_model(folder, seed=0, num_layers=1, num_heads=2, num_kv_heads=1, **sizes)
    return folder


READS: tuple[Callable[[Tensor], object], ...] = (
    float, bool, Tensor.item, lambda x: x.tolist(), Tensor.cpu, Tensor.nonzero, Tensor.unique, lambda x: x.to("cpu"),
    lambda x: x[x > 0], lambda x: torch.equal(x, x), lambda x: x.masked_select(x > 0),
    lambda x: torch.zeros(1, device=DEVICE).repeat_interleave(x.long()),
    lambda x: x.clone().index_put_((x > 0,), x), lambda x: torch.zeros(1).copy_(x),
)  # fmt: skip
SENDS: tuple[Callable[[Tensor, Tensor], object], ...] = (
    lambda x, host: host.to(x), lambda x, host: host.to(x.device, non_blocking=True),
    lambda x, host: host.to(device=x.device), lambda x, host: x.copy_(host), lambda x, host: x[host.long()],
    lambda x, host: x.index_put((host.long(),), x), lambda x, host: torch.tensor([0.0], device=x.device),
)  # fmt: skip


def waits_of_reads(card: Card) -> list[int]:
    counts = []
    for read in READS:
        card.lines.clear()
        with contextlib.suppress(DataDependentOutputException, DynamicOutputShapeException):
            read(2 * torch.ones(1, device=DEVICE))
        counts.append(card.count)
    return counts


def test_each_kind_of_read_is_noticed(on_card: OnCard) -> None:
    assert on_card(waits_of_reads) == [1] * len(READS)


def waits_of_sends(card: Card) -> list[int]:
    counts = []
    for send in SENDS:
        card.lines.clear()
        send(torch.ones(1, device=DEVICE), torch.zeros(1))
        counts.append(card.count)
    card.lines.clear()
    place = sent(torch.zeros(1), DEVICE)
    place[place.long()].sum().to(torch.float64)
    return [*counts, card.count]


def test_each_copy_to_the_device_that_is_waited_for_is_noticed(on_card: OnCard) -> None:
    assert on_card(waits_of_sends) == [*[1] * len(SENDS), 0]


def waits_of_copies(card: Card) -> list[int]:
    hidden, counts = torch.ones(3, device=DEVICE), []
    assert hidden.to("cpu", non_blocking=True).tolist() == [1.0, 1.0, 1.0]
    early = HostCopy({"twice": 2 * hidden})
    counts.append(card.count)
    hidden.sum().item()
    early.wait()
    counts.append(card.count)
    HostCopy({"twice": 2 * hidden}).wait()
    return [*counts, card.count]


def test_a_copy_is_waited_for_where_nothing_else_was_since(on_card: OnCard) -> None:
    assert on_card(waits_of_copies) == [0, 1, 2]
    assert HostCopy({"twice": 2 * torch.ones(3)}).wait()["twice"].tolist() == [2.0, 2.0, 2.0]


def mixes_and_wrong_kernels(card: Card) -> list[str]:
    errors = []
    calls: list[Callable[[], object]] = [
        lambda: torch.ones(3, device=DEVICE) + torch.ones(3),
        lambda: torch.ones(3, 3, device=DEVICE) @ torch.ones(3, 3, device=DEVICE, dtype=torch.bfloat16),
        lambda: torch.ones(3, device=DEVICE).numpy(),
    ]
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001
            errors.append(str(error))
    return errors


def test_a_mix_of_devices_or_dtypes_is_refused(on_card: OnCard) -> None:
    devices, dtypes, numpy = on_card(mixes_and_wrong_kernels)
    assert "cuda:0 and cpu" in devices
    assert "float32, torch.bfloat16" in dtypes
    assert "numpy" in numpy


def updated(card: Card, folder: str, settings: dict[str, Any], options: dict[str, Any]) -> tuple[Waits, int]:
    """Waits of the second update of a policy, when the optimizer has its state, and calls of FlashAttention."""
    batch = random_batch(torch.float32)
    actor = make_actor(
        Path(folder), AlgorithmConfig(**settings), device="cuda", **{"dtype": "bfloat16", **options}
    )
    actor.update_policy(batch, totals_of(batch))
    card.lines.clear()
    actor.update_policy(batch, totals_of(batch))
    return card.lines, card.num_attentions


KL_ENTROPY: dict[str, Any] = {"use_kl_loss": True, "entropy_coeff": 0.02}
UPDATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one micro-batch": ({}, {"max_tokens": FEW}),
    "one, a loss of whole rows": ({**KL_ENTROPY, "policy_loss": "gspo"}, {"max_tokens": FEW}),
    "several": ({}, {"max_tokens": MANY}),
    "kl-entropy": (KL_ENTROPY, {"max_tokens": MANY}),
    "a loss of whole rows": ({"policy_loss": "gspo"}, {"max_tokens": MANY}),
    "float32": ({}, {"max_tokens": MANY, "dtype": "float32"}),
    "an adapter": ({}, {"max_tokens": MANY, "lora": LoraConfig(rank=2)}),
}


@pytest.mark.parametrize(
    "name", by_default(UPDATES, "several", "kl-entropy", "a loss of whole rows", "float32", "an adapter")
)
def test_a_policy_update_reads_once(on_card: OnCard, small_model: Path, name: str) -> None:
    waits, num_attentions = on_card(updated, str(small_model), *UPDATES[name])
    assert waits.total() == 1, waits
    assert (num_attentions > 0) == (name != "float32"), "FlashAttention takes half precision"


def stepped(
    card: Card, folder: str, model: dict[str, Any], engine: dict[str, Any], optim: dict[str, Any]
) -> Waits:
    """Waits of the second step of an engine, with a model of random weights."""
    config = ModelConfig(path=folder, **{"dtype": "bfloat16", **model})
    learner = train_engine(
        load_model(config, device="cuda"), EngineConfig(max_tokens_per_device=MANY, **engine),
        OptimizerConfig(**optim), total_steps=None, parallel=alone(DEVICE),
    )  # fmt: skip
    for _ in range(2):
        card.lines.clear()
        learner.accumulate(few_rows(), of_log_probs(lambda log_probs, *_: -log_probs.sum(), temperature=1.0))
        learner.step()
    return card.lines


def few_rows() -> DataProto:
    """Rows of one prompt, whose responses part at their first token."""
    return make_rows([torch.arange(3, 8)] * 3, [torch.arange(n) + n for n in (4, 12, 6)])


@pytest.mark.parametrize(
    "rows",
    [few_rows(), random_batch(), value_batch(), outcome_batch()],
    ids=["few", "random", "values", "outcomes"],
)
def test_rows_are_several_micro_batches(rows: DataProto) -> None:
    assert len(micro_batches(rows, max_tokens=MANY, parallel=alone(torch.device("cpu")))) > 1
    assert len(micro_batches(rows, max_tokens=FEW, parallel=alone(torch.device("cpu")))) == 1


STEPS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "capped attention": ("gemma2", {}, {}, {}),
    "experts": ("mixtral", {}, {}, {}),
    "a state": ("qwen3_5", {}, {}, {}),
    "a head of its own": ("llama", {}, {}, {}),
    "checkpointing": ("qwen3", {"gradient_checkpointing": True}, {}, {}),
    "activations on the host": ("qwen3", {}, {"offload_activations": True}, {}),
    "an optimizer on the host": ("qwen3", {}, {"offload": "optimizer"}, {}),
    "muon": ("qwen3", {}, {}, {"name": "muon"}),
    "float16": ("qwen3", {"dtype": "float16"}, {}, {}),
}


@pytest.mark.parametrize(
    "name",
    by_default(
        STEPS,
        "experts",
        "checkpointing",
        "activations on the host",
        "an optimizer on the host",
        "muon",
        "float16",
    ),
)
def test_a_step_of_an_engine_reads_once(on_card: OnCard, tmp_path: Path, name: str) -> None:
    kind, *settings = STEPS[name]
    save_tiny(kind, tmp_path)
    waits = on_card(stepped, str(tmp_path), *settings)
    assert waits.total() == 1, waits


def of_routers(card: Card, folder: str) -> Waits:
    """Waits of an update with both losses of routers."""
    tensors = random_batch(torch.float32).tensors()
    few = {name: [ids % 50 + 2 for ids in columns.rows(tensors[name])] for name in ("prompts", "responses")}
    batch = DataProto.from_dict(dict(tensors) | {name: columns.jagged(rows) for name, rows in few.items()})
    batch.meta_info["temperature"] = 1.0
    moe = MoEConfig(z_loss_coef=0.1, balance_loss_coef=0.1)
    actor = make_actor(
        Path(folder), AlgorithmConfig(), max_tokens=MANY, device="cuda", dtype="bfloat16", moe=moe
    )
    for _ in range(2):
        card.lines.clear()
        actor.update_policy(batch, totals_of(batch))
    return card.lines


def test_routers_are_read_four_times_whatever_the_layers_and_micro_batches(
    on_card: OnCard, tmp_path: Path
) -> None:
    """Choices before the passes, the norm, and values and loads behind it."""
    save_tiny("mixtral", tmp_path)
    waits = on_card(of_routers, str(tmp_path))
    assert waits.total() == 4, waits


def of_critic(card: Card, folder: str) -> Waits:
    batch = value_batch(torch.float32)
    critic = make_critic(Path(folder), AlgorithmConfig(), max_tokens=MANY, device="cuda", dtype="bfloat16")
    for _ in range(2):
        card.lines.clear()
        critic.update_critic(batch, totals_of(batch))
    return card.lines


def of_fine_tuning(card: Card, folder: str, coef: float) -> Waits:
    batch = random_batch(torch.float32)
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
        ModelConfig(path=folder, dtype="bfloat16"),
        EngineConfig(max_tokens_per_device=MANY),
        OptimizerConfig(lr=1e-3),
        TrainingInit(device="cuda", num_updates=10),
        SftDistillationConfig(coef=coef),
    )
    for _ in range(2):
        card.lines.clear()
        worker.update(batch, totals_of(batch))
    return card.lines


def of_process_rewards(card: Card, folder: str) -> tuple[Waits, Waits]:
    batch = outcome_batch()
    batch = batch.union(prm_ref(batch, Path(folder)))
    prm = make_prm(Path(folder), max_tokens=MANY, device="cuda", dtype="bfloat16")
    for _ in range(2):
        card.lines.clear()
        prm._update(batch, totals_of(batch))
    updates = Counter(card.lines)
    card.lines.clear()
    prm.compute_process_rewards(batch)
    return updates, card.lines


def of_log_prob_pass(card: Card, folder: str) -> Waits:
    batch = random_batch(torch.float32)
    actor = make_actor(Path(folder), AlgorithmConfig(), max_tokens=MANY, device="cuda", dtype="bfloat16")
    card.lines.clear()
    found = actor.compute_log_prob(batch)
    assert bool((columns.flat(found.tensors()["old_log_probs"]) == 1).all())
    return card.lines


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (of_critic, ()),
        pytest.param(of_fine_tuning, (0.0,), marks=pytest.mark.slow),
        (of_fine_tuning, (1.0,)),
        (of_log_prob_pass, ()),
    ],
)
def test_each_role_reads_once(
    on_card: OnCard, small_model: Path, function: Callable[..., Waits], args: tuple[Any, ...]
) -> None:
    waits = on_card(function, str(small_model), *args)
    assert waits.total() == 1, waits


def test_a_process_reward_model_reads_once(on_card: OnCard, small_model: Path) -> None:
    for waits in on_card(of_process_rewards, str(small_model)):
        assert waits.total() == 1, waits


def of_a_frozen_model(card: Card, folder: str) -> tuple[Waits, int, set[torch.dtype]]:
    config = ModelConfig(path=folder, dtype="bfloat16")
    model = load_model(config, device="cuda", holds_half=True)
    engine = frozen_engine(model, EngineConfig(max_tokens_per_device=MANY), alone(DEVICE))
    card.lines.clear()
    log_probs_of(engine, few_rows(), temperature=1.0)
    return card.lines, card.num_attentions, {p.dtype for name, p in model.named_parameters() if "mlp" in name}


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("mixtral", marks=pytest.mark.slow), "qwen3_5"])
def test_a_frozen_model_in_half_reads_once(on_card: OnCard, tmp_path: Path, kind: str) -> None:
    save_tiny(kind, tmp_path)
    waits, num_attentions, dtypes = on_card(of_a_frozen_model, str(tmp_path))
    assert waits.total() == 1, waits
    assert num_attentions > 0
    assert torch.bfloat16 in dtypes


def offloaded(card: Card, folder: str) -> tuple[Waits, int, int]:
    batch = random_batch(torch.float32)
    actor = make_actor(Path(folder), AlgorithmConfig(), max_tokens=MANY, device="cuda", dtype="bfloat16")
    actor.update_policy(batch, totals_of(batch))
    weights = [p for _, p in actor.engine.model.named_parameters()]
    before = sum(p.untyped_storage().nbytes() for p in weights)
    card.lines.clear()
    actor.offload()
    left = sum(p.untyped_storage().nbytes() for p in weights)
    actor.engine.load_to_device()
    waits = Counter(card.lines)
    assert sum(p.untyped_storage().nbytes() for p in weights) == before
    actor.update_policy(batch, totals_of(batch))
    return waits, before, left


def test_weights_leave_for_host_memory_and_come_back_without_a_read(
    on_card: OnCard, small_model: Path
) -> None:
    waits, before, left = on_card(offloaded, str(small_model))
    assert before > 0
    assert left == 0
    assert waits.total() == 0, waits


def synced(card: Card, folder: str) -> Waits:
    """Waits while weights of a policy, in the precision of an engine, are copied to it."""
    config = ModelConfig(path=folder, dtype="bfloat16")
    policy, engine = (load_model(config, device="cuda") for _ in range(2))
    target = ModuleTarget(engine.module)
    target.digests([weight.name for weight in target.weights_metadata()])  # multipliers are sent once
    card.lines.clear()
    for bucket in parameter_stream(
        policy.module, bucket_bytes=1 << 14, dtypes=target.weights_metadata().dtypes
    ):
        target.load([(weight.name, tensor) for weight, tensor in bucket.tensors()])
    digests = target.digests([weight.name for weight in target.weights_metadata()])
    assert len(digests) > 1
    return card.lines


def test_a_sync_of_weights_reads_their_digests_at_once(on_card: OnCard, small_model: Path) -> None:
    waits = on_card(synced, str(small_model))
    assert waits.total() == 1, waits


def packed_for_ranks(card: Card, folder: str, axes: dict[str, int]) -> Waits:
    """Packing communicates nothing: groups are asked for their ranks alone."""
    groups = {f"{name.removesuffix('_size')}_group" for name in axes} | (
        {"row_group"} if len(axes) > 1 else set()
    )
    parallel: Any = SimpleNamespace(
        **dict.fromkeys(("sp_size", "cp_size", "tp_size"), 1) | axes, tp_mesh=None,
        **{name: name if name in groups else None for name in ("sp_group", "cp_group", "row_group")},
    )  # fmt: skip
    model = load_model(ModelConfig(path=folder, dtype="float32"), device="cuda")
    card.lines.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda group: 4 if group == "row_group" else 2)
        patch.setattr(dist, "get_rank", lambda group: 1)
        tokens = pack(random_batch(torch.float32), model, parallel=parallel)
    assert isinstance(tokens.shard, SequenceShard)
    assert isinstance(tokens.hidden_index, FakeTensor)
    assert isinstance(tokens.shard.send_index, FakeTensor)
    return card.lines


@pytest.mark.parametrize(
    "axes", [{"sp_size": 2}, {"cp_size": 2}, {"sp_size": 2, "cp_size": 2}], ids=lambda axes: "-".join(axes)
)
def test_a_rank_takes_its_part_of_a_micro_batch_without_a_read(
    on_card: OnCard, small_model: Path, axes: dict[str, int]
) -> None:
    waits = on_card(packed_for_ranks, str(small_model), axes)
    assert waits.total() == 0, waits


WAYS: dict[str, dict[str, Any]] = {
    "sampled": {},
    "greedy beside sampled": {"temperature": 0.0},
    "cut by top-p": {"top_p": 0.5},
    "cut by top-k": {"top_k": 5},
    "warmer": {"temperature": 0.7},
}


def decoded(card: Card, folder: str, dtype: str, way: str, is_static: bool, reads_behind: bool) -> Any:
    """Waits of three steps, the tokens of each sequence, and the steps that were captured."""
    model = load_model(ModelConfig(path=folder, dtype=dtype), device="cuda")  # type: ignore[arg-type]
    batch = DecodeBatch(model, max_running=5)
    assert isinstance(batch._steps, StaticStep)
    assert isinstance(batch._half, HalfCopy) is (dtype == "bfloat16")
    batch._steps = batch._steps if is_static else None
    batch._reads_behind = reads_behind
    batch.waiting.extend(
        Request(f"r{n}", tuple(range(10, 15 + n)), Sampling(key=n, max_tokens=60, **how))
        for n, how in enumerate([WAYS[way], {}, WAYS[way]])
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graph, "CAPTURE_AFTER", 1)
        for _ in range(3):  # in the second one the step is captured
            batch.step(0)
        card.lines.clear()
        for _ in range(3):
            batch.step(0)
    captured = 0 if batch._steps is None else batch._steps.num_captured
    return card.lines, {len(request.token_ids) for request in batch.running}, captured


@pytest.mark.parametrize(
    "reads_behind", [pytest.param(False, marks=pytest.mark.slow), True], ids=["at once", "behind"]
)
@pytest.mark.parametrize("is_static", [False, True], ids=["own pass", "captured"])
@pytest.mark.parametrize("way", WAYS)
def test_a_decoded_token_of_all_sequences_is_read_once(
    on_card: OnCard, small_model: Path, way: str, is_static: bool, reads_behind: bool
) -> None:
    waits, lengths, captured = on_card(decoded, str(small_model), "float32", way, is_static, reads_behind)
    assert waits.total() == 3, waits
    assert lengths == {7 - reads_behind}
    assert captured == is_static


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3",
        pytest.param("mixtral", marks=pytest.mark.slow),
        pytest.param("gemma2", marks=pytest.mark.slow),
        "deepseek_v3",
    ],
)
def test_tokens_in_half_precision_are_read_once(on_card: OnCard, tmp_path: Path, kind: str) -> None:
    save_tiny(kind, tmp_path)
    waits, _, captured = on_card(decoded, str(tmp_path), "bfloat16", "sampled", True, True)
    assert waits.total() == 3, waits
    assert captured == 1


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Folders of a Qwen3 model of one layer and of two."""
    sizes = {"hidden_size": 32, "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 64}
    folders = {}
    for num_layers in (1, 2):
        folder = tmp_path_factory.mktemp("layers") / "model"
        make_tiny_model(folder, seed=0, num_layers=num_layers, num_heads=2, num_kv_heads=1, **sizes)
        folders[num_layers] = str(folder)
    return folders


def launches_of_a_decode_step(card: Card, folder: str) -> Counter[str]:
    """Of many sequences, whose keys are not divided among programs."""
    batch = DecodeBatch(load_model(ModelConfig(path=folder, dtype="bfloat16"), device="cuda"), max_running=5)
    batch._steps = None
    return launches_of_the_fourth_step(card, batch)


def launches_of_the_fourth_step(card: Card, batch: DecodeBatch) -> Counter[str]:
    batch.waiting.extend(Request(f"r{n}", (10, 11, 12), Sampling(key=n, max_tokens=9)) for n in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernel, "PROGRAMS", 1)
        for _ in range(3):
            batch.step(0)
        card.launches.clear()
        batch.step(0)
    return card.launches


def launches_in_a_captured_step(card: Card, folder: str) -> Counter[str]:
    """Of many sequences; beside its layers, as little as a step has that nobody captures."""
    batch = DecodeBatch(load_model(ModelConfig(path=folder, dtype="bfloat16"), device="cuda"), max_running=5)
    layers = fused_layers(batch._decoder)
    assert layers is not None
    batch._steps = StaticStep(batch._decoder, None, layers)
    return launches_of_the_fourth_step(card, batch)


def launches_beside_a_captured_step(card: Card, folder: str) -> Counter[str]:
    """Of three sequences, in a step of four."""
    batch = DecodeBatch(load_model(ModelConfig(path=folder, dtype="bfloat16"), device="cuda"), max_running=5)
    batch.waiting.extend(Request(f"r{n}", (10, 11, 12), Sampling(key=n, max_tokens=9)) for n in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graph, "CAPTURE_AFTER", 1)
        for _ in range(4):
            batch.step(0)
        assert isinstance(batch._steps, StaticStep)
        assert batch._steps.num_captured == 1
        card.launches.clear()
        batch.step(0)
    return card.launches


def launches_of_a_prefill(card: Card, folder: str) -> Counter[str]:
    """A step in which a prompt enters, beside those of a step without it."""
    batch = DecodeBatch(load_model(ModelConfig(path=folder, dtype="bfloat16"), device="cuda"), max_running=5)
    batch._steps = None
    of_steps = []
    for number in range(3):
        if number != 1:
            ids = tuple(range(10 + number, 14 + number))
            batch.waiting.append(Request(f"r{number}", ids, Sampling(key=number, max_tokens=9)))
        card.launches.clear()
        batch.step(0)
        of_steps.append(Counter(card.launches))
    return of_steps[2] - of_steps[1]


def launches_of_an_update(card: Card, folder: str) -> Counter[str]:
    batch = random_batch(torch.float32)
    actor = make_actor(Path(folder), AlgorithmConfig(), max_tokens=FEW, device="cuda", dtype="bfloat16")
    for _ in range(2):
        card.launches.clear()
        actor.update_policy(batch, totals_of(batch))
    return card.launches


@pytest.mark.parametrize(
    ("function", "of_a_layer", "beside"),
    [
        (launches_of_a_decode_step, 17, 18),
        (launches_in_a_captured_step, 9, 19),
        (launches_beside_a_captured_step, 0, 7),
        (launches_of_a_prefill, 17, 34),
        (launches_of_an_update, 94, 266),
    ],
    ids=["decode step", "captured step", "beside a captured step", "prefill", "update"],
)
def test_kernels_stay_as_few_as_they_are(
    on_card: OnCard,
    layered: dict[int, str],
    function: Callable[..., Counter[str]],
    of_a_layer: int,
    beside: int,
) -> None:
    """Of a decode step: norms of stream, queries and keys, seven products, two rotations, attention, the gate and two
    sums. Of a captured one: two sums with norms, four products, heads, attention, the gate. Beside it: what it takes
    (two), how rows are drawn, two kernels that draw, and two copies to the host."""
    one, two = (on_card(function, layered[num_layers]) for num_layers in (1, 2))
    assert two.total() - one.total() <= of_a_layer, two - one
    assert 2 * one.total() - two.total() <= beside, one


def rounded_weights_before_pages(card: Card, folder: str) -> list[bool]:
    """Of each pool of keys and values, whether the rounded weights were there when it was made."""
    batch = DecodeBatch(load_model(ModelConfig(path=folder, dtype="bfloat16"), device="cuda"), max_running=5)
    half, pool_of, found = batch._half, PagedCache._pool_of, []
    assert half is not None

    def noted(cache: PagedCache, size: int) -> Tensor | None:
        found.append(all(rounded.numel() for _, rounded in half._pairs))
        return pool_of(cache, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedCache, "_pool_of", noted)
        for number in range(2):  # the second time the form of the pool is known
            batch.waiting.append(Request(f"r{number}", (10, 11), Sampling(key=number, max_tokens=2)))
            while not batch.is_idle:
                batch.step(0)
            batch.free()
    return found


def test_pages_take_of_the_memory_that_rounded_weights_leave(on_card: OnCard, small_model: Path) -> None:
    assert on_card(rounded_weights_before_pages, str(small_model)) == [True, True]


def entered(card: Card, folder: str) -> Waits:
    """Waits of a step in which a prompt enters beside a running one that it goes on from."""
    model = load_model(ModelConfig(path=folder, dtype="bfloat16"), device="cuda")
    batch = DecodeBatch(model, max_running=5)
    batch._steps = None
    for number, length in enumerate((40, 45)):
        batch.waiting.append(
            Request(f"r{number}", tuple(range(10, 10 + length)), Sampling(key=1, max_tokens=9))
        )
        batch.step(0)
        if number == 0:
            card.lines.clear()
    return card.lines


def test_a_prompt_enters_with_one_read(on_card: OnCard, small_model: Path) -> None:
    """Of its first token, beside that of the tokens of the step before."""
    waits = on_card(entered, str(small_model))
    assert waits.total() == 2, waits


def picked(logits: Tensor) -> tuple[Tensor, list[int]]:
    """Tokens of three rows that sample in three ways, for which the likeliest stands, and how many rows each takes."""
    sizes = []
    rows = np.zeros(3, dtype=sampling.SEQUENCE)
    rows["temperature"], rows["top_p"], rows["top_k"] = (0.0, 1.0, 1.0), 1.0, (0, 3, 0)

    def pick(logits: Tensor, normalizer: Tensor, some: sampling.Rows, vocabulary: object) -> Tensor:
        sizes.append(len(some))
        return logits.argmax(-1)

    class Vocabulary:
        def logsumexp(self, logits: Tensor) -> Tensor:
            return torch.logsumexp(logits, -1)

        def places(self, tokens: Tensor) -> Tensor:
            return tokens

        def at(self, logits: Tensor, places: Tensor) -> Tensor:
            return logits.gather(-1, places)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_likeliest", "_drawn_of_cut", "_drawn"):
            patch.setattr(sampling, name, pick)
        return sampling._over_ranks(logits, rows, Vocabulary())[0], sizes  # type: ignore[arg-type]


def waits_of_picks(card: Card) -> tuple[Waits, list[int]]:
    _, sizes = picked(torch.zeros(3, 7, device=DEVICE))
    return card.lines, sizes


def test_a_vocabulary_over_ranks_picks_rows_without_a_read(on_card: OnCard) -> None:
    waits, sizes = on_card(waits_of_picks)
    assert waits.total() == 0, waits
    assert sizes == [1, 1, 1]
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(picked(logits)[0], logits.argmax(-1))
