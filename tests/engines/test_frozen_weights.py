"""Frozen weights held in half precision: the numbers of a pass that rounds them anew, and half of the memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from references.language_models import config as shape_of
from references.language_models import load_plain, save_model
from references.rank_processes import Ranks, run_ranks
from references.token_passes import log_probs_of, of_log_probs, values_of
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.gradients import full, local
from strop.engines.half_weights import hold_half, linear_layers_in
from strop.engines.kinds import ModelEngine, TrainableEngine, frozen_engine, train_engine
from strop.engines.lora.adapters import ADAPTER, save_merged
from strop.engines.model import load_model
from strop.engines.moe.precision import use_compute_precision
from strop.engines.packing import make_rows
from strop.engines.parallel.ranks import Parallel, alone
from strop.engines.pretrained_module import read_module
from strop.engines.training import Engine, TrainEngine
from strop.engines.value_models import load_value_model
from strop.protocol import DataProto
from strop.workers.config import ReferenceConfig
from strop.workers.reference import ReferenceWorker

Folders = Callable[[str], Path]
Tiny = Callable[..., CausalLM]
CPU = torch.device("cpu")
OPTIM = OptimizerConfig(lr=1e-2, weight_decay=0.0)
PROMPT, RESPONSES = [5, 9, 2, 40], [[7, 3, 3, 11], [60], [8, 21, 30, 4, 17], [2, 50]]


def rows(which: slice = slice(None)) -> DataProto:
    responses = RESPONSES[which]
    return make_rows([torch.tensor(PROMPT)] * len(responses), [torch.tensor(r) for r in responses])


def widened(model: CausalLM) -> CausalLM:
    """The model with all of its weights in float32."""
    for parameter in model.module.parameters():
        parameter.data = parameter.data.float()
    return model


def num_bytes(model: CausalLM) -> int:
    """Of all parameters, of this rank's shards."""
    return sum(local(p).numel() * p.element_size() for _, p in model.named_parameters())


def held(model: CausalLM) -> set[str]:
    return {name for name, tensor in model.named_parameters() if tensor.dtype == torch.bfloat16}


def loss(log_probs: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return -log_probs.sum() / 10


def take_steps(engine: TrainEngine | TrainableEngine, which: slice = slice(None)) -> list[Any]:
    reports = []
    for _ in range(3):
        engine.accumulate(rows(which), of_log_probs(loss, temperature=1.0))
        reports.append(engine.step())
    return reports


@pytest.fixture
def bfloat16_folder(tiny_folder: Folders, tmp_path: Path) -> Callable[[str], Path]:
    """The tiny model of a kind, as a folder in bfloat16."""

    def folder(kind: str) -> Path:
        path = tmp_path / f"{kind}_bfloat16"
        load_plain(tiny_folder(kind), dtype=torch.bfloat16).save_pretrained(path)
        return path

    return folder


def test_layers_that_another_thread_makes_stay_wide() -> None:
    with linear_layers_in(torch.bfloat16, vocab_size=7), ThreadPoolExecutor(1) as thread:
        theirs, ours = thread.submit(nn.Linear, 2, 3).result(), nn.Linear(2, 3)
    assert (theirs.weight.dtype, ours.weight.dtype) == (torch.float32, torch.bfloat16)


def test_only_a_folder_that_is_read_in_half_needs_the_size_of_its_vocabulary(
    bfloat16_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(path=str(bfloat16_folder("qwen3")))
    shape = SimpleNamespace(get_text_config=SimpleNamespace)  # of a model with code of its own
    monkeypatch.setattr("strop.engines.pretrained_module.load_model_config", lambda _: shape)
    assert read_module(config, AutoModelForCausalLM).lm_head.weight.shape == (61, 32)
    with pytest.raises(
        ValueError, match="no loadable causal language model: its config.json gives vocab_size as"
    ):
        read_module(config, AutoModelForCausalLM, half=torch.bfloat16)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "llama_biased", "gpt2", "gemma3", "phi", "mixtral"])
def test_a_frozen_model_gives_the_bits_of_autocast(tiny: Tiny, kind: str) -> None:
    wide, half = tiny(kind, dtype="bfloat16"), tiny(kind, dtype="bfloat16")
    expected = log_probs_of(Engine(wide, EngineConfig(), is_frozen=True), rows(), temperature=0.7)
    engine = frozen_engine(half, EngineConfig(), alone(CPU))
    for one, other in zip(log_probs_of(engine, rows(), temperature=0.7), expected, strict=True):
        assert torch.equal(one, other)
    assert not held(wide)
    assert held(half)


def test_a_value_model_gives_the_bits_of_autocast(tiny_folder: Folders) -> None:
    config = ModelConfig(path=str(tiny_folder("qwen3")), dtype="bfloat16")
    wide, half = (load_value_model(config, device="cpu") for _ in range(2))
    for model in (wide, half):
        with torch.no_grad():
            model.head_weight.copy_(torch.linspace(-1, 1, model.hidden_size))
    expected = values_of(Engine(wide, EngineConfig(), is_frozen=True), rows())
    assert torch.equal(values_of(frozen_engine(half, EngineConfig(), alone(CPU)), rows()), expected)
    assert half.head_weight.dtype == torch.float32


def test_matrices_of_layers_take_half_the_memory_and_norms_and_embeddings_stay_wide(tiny: Tiny) -> None:
    model = tiny("qwen3", dtype="bfloat16")
    # 61 tokens of 32 numbers; layers of 4 query and 2 key heads of 8, and 48 inner numbers; norms of 32, 32, 8 and 8.
    embedding, matrices, norms = 61 * 32, 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48), 2 * 80 + 32
    assert num_bytes(model) == 4 * (embedding + matrices + norms)
    frozen_engine(model, EngineConfig(), alone(CPU))
    assert num_bytes(model) == 4 * (embedding + norms) + 2 * matrices
    assert all("proj" in name for name in held(model))


def test_experts_take_half_the_memory_on_an_accelerator_alone(tiny: Tiny) -> None:
    # Layers of 4 experts with three matrices of 32 x 48; of 4 query and 2 key heads of 8; a head of 61 x 32.
    experts, matrices, head = 2 * 4 * 3 * 32 * 48, 2 * (2 * 32 * 32 + 2 * 32 * 16), 61 * 32
    for device, rounded in (("cpu", matrices), ("cuda", experts + matrices + head)):
        model = tiny("mixtral", dtype="bfloat16")
        wide = num_bytes(model)
        use_compute_precision(model.module, torch.device(device))
        hold_half(model, device=torch.device(device))
        assert wide - num_bytes(model) == 2 * rounded


def test_experts_on_a_cpu_are_not_rounded_by_a_pass(tiny: Tiny) -> None:
    model, dtypes = tiny("mixtral", dtype="bfloat16"), set[torch.dtype]()

    class Products(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch._grouped_mm:
                dtypes.add(args[1].dtype)
            return func(*args, **(kwargs or {}))

    with Products():
        log_probs_of(Engine(model, EngineConfig(), is_frozen=True), rows(), temperature=0.7)
    assert dtypes == {torch.float32}


def test_experts_that_do_not_fit_the_kernel_of_half_precision_stay_wide(tmp_path: Path) -> None:
    shape = shape_of("mixtral")
    shape.intermediate_size = 12  # 24 bytes, no multiple of 16
    save_model(shape, tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path), dtype="bfloat16"), device="cpu")
    expected = log_probs_of(Engine(model, EngineConfig(), is_frozen=True), rows(), temperature=0.7)
    use_compute_precision(model.module, torch.device("cuda"))
    hold_half(model, device=CPU)
    assert not any("experts" in name for name in held(model))
    found = log_probs_of(Engine(model, EngineConfig(), is_frozen=True), rows(), temperature=0.7)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_an_untied_head_is_held_in_half_where_logits_come_from_half(tiny: Tiny) -> None:
    for device, is_half in (("cpu", False), ("cuda", True)):
        model = tiny("llama", dtype="bfloat16")
        hold_half(model, device=torch.device(device))
        assert (model.head_weight.dtype == torch.bfloat16) is is_half
        tied = tiny("qwen3", dtype="bfloat16")
        hold_half(tied, device=torch.device(device))
        assert tied.head_weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_wide_model_stays_as_it_is(tiny: Tiny, dtype: str) -> None:
    model = tiny("qwen3", dtype=dtype)
    frozen_engine(model, EngineConfig(), alone(CPU))
    assert {tensor.dtype for _, tensor in model.named_parameters()} == {getattr(torch, dtype)}


def test_the_reference_of_a_run_is_held_in_half(tiny_folder: Folders) -> None:
    model = ModelConfig(path=str(tiny_folder("qwen3")), dtype="bfloat16")
    worker = ReferenceWorker(model, ReferenceConfig(), device="cpu")
    assert len(held(worker.engine.model)) == 2 * 7


def adapted(folder: Path | str, parallel: Parallel | None = None) -> CausalLM:
    config = ModelConfig(path=str(folder), dtype="bfloat16", lora=LoraConfig(rank=3, alpha=6.0))
    return load_model(config, device="cpu", parallel=parallel)


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_the_base_of_an_adapter_learns_the_same_bits(
    bfloat16_folder: Folders, tmp_path: Path, kind: str
) -> None:
    folder = bfloat16_folder(kind)
    wide, half = widened(adapted(folder)), adapted(folder)
    reports = take_steps(TrainEngine(wide, EngineConfig(), OPTIM, total_steps=None))
    engine = train_engine(half, EngineConfig(), OPTIM, total_steps=None, parallel=alone(CPU))
    assert take_steps(engine) == reports
    assert held(half)
    assert not any(ADAPTER in name for name in held(half))
    for (name, one), (_, other) in zip(half.named_parameters(), wide.named_parameters(), strict=True):
        assert torch.equal(one.to(other.dtype), other), name
    for name, model in (("wide", wide), ("half", half)):
        save_merged(model, tmp_path / name)
    merged, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("half", "wide"))
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        assert merged[name].dtype == tensor.dtype == torch.float32
        assert torch.equal(merged[name], tensor), name


@contextlib.contextmanager
def read_parameters() -> Iterator[list[torch.dtype]]:
    """Types of the matrices of layers and experts that a file brings, as they are handed to them."""
    dtypes: list[torch.dtype] = []

    def registered(layer: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or parameter.is_meta or parameter.dim() < 2:
            return
        is_linear = isinstance(layer, nn.Linear | Conv1D) and 61 not in parameter.shape  # tokens: the head
        if is_linear or type(layer).__name__.endswith("Experts"):
            dtypes.append(parameter.dtype)

    handle = register_module_parameter_registration_hook(registered)
    try:
        yield dtypes
    finally:
        handle.remove()


def same(model: CausalLM, other: CausalLM) -> None:
    """Both hold the same bits in the same types, parameters and buffers."""
    held_by = [
        dict(m.module.named_parameters(remove_duplicate=False)) | dict(m.module.named_buffers())
        for m in (model, other)
    ]
    assert held_by[0].keys() == held_by[1].keys()
    for name, tensor in held_by[0].items():
        assert tensor.dtype == held_by[1][name].dtype, name
        assert torch.equal(tensor, held_by[1][name]), name


@pytest.mark.parametrize("kind", ["qwen3", "llama", "llama_biased", "gpt2", "gemma3", "phi", "mixtral"])
def test_a_folder_in_half_is_read_in_it(bfloat16_folder: Folders, kind: str) -> None:
    config = ModelConfig(path=str(bfloat16_folder(kind)), dtype="bfloat16")
    rounded = load_model(config, device="cpu")
    assert not held(rounded)
    hold_half(rounded, device=CPU)
    with read_parameters() as dtypes:
        read = load_model(config, device="cpu", holds_half=True)
    assert dtypes
    assert set(dtypes) == {torch.bfloat16}, "never there in float32"
    same(read, rounded)
    hold_half(read, device=CPU)
    same(read, rounded)


def test_a_folder_in_float32_is_rounded(tiny_folder: Folders) -> None:
    config = ModelConfig(path=str(tiny_folder("llama")), dtype="bfloat16")
    rounded = load_model(config, device="cpu")
    hold_half(rounded, device=CPU)
    same(load_model(config, device="cpu", holds_half=True), rounded)


def test_a_value_model_is_read_in_half(bfloat16_folder: Folders) -> None:
    config = ModelConfig(path=str(bfloat16_folder("qwen3")), dtype="bfloat16")
    rounded = load_value_model(config, device="cpu")
    hold_half(rounded, device=CPU)
    read = load_value_model(config, device="cpu", holds_half=True)
    assert read.head_weight.dtype == torch.float32
    same(read, rounded)


def test_the_base_of_an_adapter_is_read_in_half_and_the_adapter_is_wide(bfloat16_folder: Folders) -> None:
    folder = bfloat16_folder("qwen3")
    with read_parameters() as dtypes:
        model = adapted(folder)
    assert dtypes.count(torch.bfloat16) >= 14
    assert held(model)
    assert not any(
        parameter.requires_grad for name, parameter in model.named_parameters() if name in held(model)
    )
    config = ModelConfig(path=str(folder), dtype="bfloat16", lora=LoraConfig(rank=3, alpha=6.0))
    critic = load_value_model(config, device="cpu")
    assert critic.head_weight.requires_grad
    assert critic.head_weight.dtype == torch.float32
    assert held(critic)


def test_a_base_that_rounding_would_change_stays_wide(tiny_folder: Folders) -> None:
    model = adapted(tiny_folder("qwen3"))
    base = {name: deepcopy(p.detach()) for name, p in model.named_parameters()}
    train_engine(model, EngineConfig(), OPTIM, total_steps=None, parallel=alone(CPU))
    assert not held(model)
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters())


def test_what_is_trained_stays_wide(bfloat16_folder: Folders) -> None:
    model = load_model(ModelConfig(path=str(bfloat16_folder("qwen3")), dtype="bfloat16"), device="cpu")
    train_engine(model, EngineConfig(), OPTIM, total_steps=None, parallel=alone(CPU))
    assert not held(model)


def on_ranks(ranks: Ranks, folder: str) -> dict[str, Any]:
    """A frozen model and an adapter on this rank's rows, with wide weights and with half of them."""
    parallel = ranks.join()
    which = slice(0, 3) if ranks.rank == 0 else slice(3, 4)
    config = ModelConfig(path=folder, dtype="bfloat16")
    engines: list[ModelEngine] = [
        Engine(load_model(config, parallel=parallel), EngineConfig(), parallel, is_frozen=True),
        frozen_engine(load_model(config, parallel=parallel, holds_half=True), EngineConfig(), parallel),
    ]
    outputs = [log_probs_of(engine, rows(which), temperature=0.7)[0] for engine in engines]
    sizes = [num_bytes(engine.model) for engine in engines]

    learners: list[TrainableEngine] = [
        TrainEngine(
            widened(adapted(folder, parallel)), EngineConfig(), OPTIM, total_steps=None, parallel=parallel
        ),
        train_engine(adapted(folder, parallel), EngineConfig(), OPTIM, total_steps=None, parallel=parallel),
    ]
    checksum = learners[1].checksum()
    reports = [take_steps(learner, which) for learner in learners]
    weights = [
        {name: full(p.detach()).float().clone() for name, p in learner.model.named_parameters()}
        for learner in learners
    ]
    return {
        "outputs": outputs, "sizes": sizes, "reports": reports, "weights": weights, "checksum": checksum,
        "held": held(learners[1].model),
    }  # fmt: skip


@pytest.mark.dist
def test_sharded_models_give_the_bits_of_wide_ones(bfloat16_folder: Folders) -> None:
    folder = str(bfloat16_folder("qwen3"))
    one = train_engine(adapted(folder), EngineConfig(), OPTIM, total_steps=None, parallel=alone(CPU))
    for result in run_ranks(on_ranks, 2, folder):
        wide, half = result["outputs"]
        assert torch.equal(half, wide)
        assert 2 * result["sizes"][1] == result["sizes"][0], "FSDP rounds every parameter"
        assert result["reports"][0] == result["reports"][1]
        wide, half = result["weights"]
        assert all(torch.equal(half[name], tensor) for name, tensor in wide.items())
        assert result["held"] == held(one.model)
        assert result["checksum"] == one.checksum(), "of any number of ranks"
