"""A trained role goes on where it was saved, on any number of ranks, to the steps of the run that was never stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_cases import NUM_ROWS, Case, accumulate, engine_of, whole_weights
from numpy.typing import NDArray
from transformers import AutoConfig

from references.rank_processes import Ranks, run_ranks
from strop.engines import gradients
from strop.engines.checkpoint import load_sharded
from strop.engines.checkpoint_reader import SavedTensors
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig
from strop.engines.lora.adapters import add_lora
from strop.engines.model import load_model
from strop.engines.parallel.ranks import alone
from strop.engines.role_checkpoint import load_role, load_weights, save_role
from strop.engines.role_tensors import role_tensors
from strop.engines.training import TrainEngine

Folders = Callable[[str], Path]
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw."""

    saved: Arrays
    """Weights and optimizer state at the checkpoint, whole."""
    after: Arrays
    """Weights two steps later."""


def one_step(engine: TrainEngine, case: Case, step: int) -> None:
    ranks = engine.parallel
    accumulate(engine, case, step, range(ranks.dp_rank, NUM_ROWS, ranks.dp_size))
    assert not engine.step().skipped


def state_of(engine: TrainEngine) -> Arrays:
    moments, numbers = engine.optimizer.state()
    moments = {name: gradients.full(tensor).numpy().copy() for name, tensor in moments.items()}
    return whole_weights(engine) | moments | {"num_steps": np.array(numbers["num_steps"])}


def train_and_save(ranks: Ranks, case: Case, folder: Path, in_background: bool) -> Seen:
    engine = engine_of(case, ranks.join(**vars(case.engine)))
    for step in range(2):
        one_step(engine, case, step)
    saved = state_of(engine)
    pending = save_role(folder, engine, in_background=in_background)
    for step in (2, 3):  # with in_background, while it is being written
        one_step(engine, case, step)
    if pending is not None:
        pending.result(60)
    return Seen(saved=saved, after=whole_weights(engine))


def resume(ranks: Ranks, case: Case, folder: Path) -> Seen:
    engine = engine_of(case, ranks.join(**vars(case.engine)))
    load_role(folder, engine)
    saved = state_of(engine)
    for step in (2, 3):
        one_step(engine, case, step)
    return Seen(saved=saved, after=whole_weights(engine))


def assert_same(found: Arrays, expected: Arrays, *, tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def check(case: Case, folder: Path, saved_on: int, resumed_on: list[int], *, in_background: bool) -> None:
    """Save on some ranks with the case's sharding, go on on others, sharded over all of them."""
    original = run_ranks(train_and_save, saved_on, case, folder, in_background)
    over_all = dataclasses.replace(case, engine=EngineConfig())
    for world_size in resumed_on:
        for seen in run_ranks(resume, world_size, over_all, folder):
            assert_same(seen.saved, original[0].saved)
            same_arithmetic = world_size == saved_on and case == over_all
            assert_same(seen.after, original[0].after, tolerance=0.0 if same_arithmetic else 1e-9)


def test_saved_on_two_ranks_goes_on_on_one_and_two(tiny_folder: Folders, tmp_path: Path) -> None:
    case = Case(folder=str(tiny_folder("qwen3")))
    check(case, tmp_path / "actor", 2, [1, 2], in_background=False)


def test_training_while_the_save_is_written_does_not_reach_it(tiny_folder: Folders, tmp_path: Path) -> None:
    check(Case(folder=str(tiny_folder("llama"))), tmp_path / "actor", 2, [1], in_background=True)


def test_saved_alone_goes_on_on_two(tiny_folder: Folders, tmp_path: Path) -> None:
    case = Case(folder=str(tiny_folder("gpt2")), values=True)
    check(case, tmp_path / "critic", 1, [2], in_background=False)


@pytest.mark.dist
@pytest.mark.parametrize("saved_on", [2, 4])
@pytest.mark.parametrize("kind", ["qwen3", "phi"])
def test_saved_on_two_or_four_goes_on_on_one_two_and_four(
    tiny_folder: Folders, tmp_path: Path, kind: str, saved_on: int
) -> None:
    hybrid = EngineConfig(shard_size=2)  # on four: two copies, each on two ranks
    case = Case(folder=str(tiny_folder(kind)), engine=hybrid)
    check(case, tmp_path / "actor", saved_on, [1, 2, 4], in_background=saved_on == 4)


def test_weights_alone_are_read_without_the_optimizer(tiny_folder: Folders, tmp_path: Path) -> None:
    case = Case(folder=str(tiny_folder("qwen3")), dtype="float32")
    engine = engine_of(case, alone("cpu"))
    one_step(engine, case, 0)
    save_role(tmp_path / "actor", engine)
    model = load_model(ModelConfig(path=case.folder, dtype="float32"), device="cpu")
    load_weights(tmp_path / "actor", model)
    for (name, found), (_, trained) in zip(
        model.named_parameters(), engine.model.named_parameters(), strict=True
    ):
        assert found.detach().equal(trained.detach()), name


def test_a_tied_head_is_saved_once_and_the_configuration_lies_beside(
    tiny_folder: Folders, tmp_path: Path
) -> None:
    engine = engine_of(Case(folder=str(tiny_folder("qwen3"))), alone("cpu"))
    save_role(tmp_path / "actor", engine)
    names = SavedTensors(tmp_path / "actor").tensors
    assert "model/model.embed_tokens.weight" in names
    assert "model/lm_head.weight" not in names
    config = AutoConfig.from_pretrained(tmp_path / "actor" / "config")
    assert config.architectures == ["Qwen3ForCausalLM"]
    critic = engine_of(Case(folder=str(tiny_folder("qwen3")), values=True), alone("cpu"))
    save_role(tmp_path / "critic", critic)
    config = AutoConfig.from_pretrained(tmp_path / "critic" / "config")
    assert (config.architectures, config.num_labels) == (["Qwen3ForSequenceClassification"], 1)
    assert "model/score.weight" in SavedTensors(tmp_path / "critic").tensors


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tiny_folder: Folders, tmp_path: Path) -> None:
    engine = engine_of(Case(folder=str(tiny_folder("qwen3"))), alone("cpu"))
    save_role(tmp_path / "actor", engine)
    other = engine_of(Case(folder=str(tiny_folder("qwen3_mha"))), alone("cpu"))
    wrong = r"of another form: model/model.layers.0.self_attn.k_proj.weight \(float64 \[16, 32\] saved"
    with pytest.raises(ValueError, match=f"does not fit this model: it lacks model/lm_head.*; {wrong}"):
        load_role(tmp_path / "actor", other)
    single = engine_of(Case(folder=str(tiny_folder("qwen3")), dtype="float32"), alone("cpu"))
    with pytest.raises(ValueError, match=r"\(float64 \[61, 32\] saved, float32 \[61, 32\] here\)"):
        load_role(tmp_path / "actor", single)


def test_buffers_of_the_model_are_saved(tiny_folder: Folders, tmp_path: Path) -> None:
    engine = engine_of(Case(folder=str(tiny_folder("llama"))), alone("cpu"))
    layer: Any = engine.model.layers[0]
    layer.register_buffer("bias_of_experts", torch.tensor([1.0, 2.0]))
    save_role(tmp_path / "actor", engine)
    layer.bias_of_experts.zero_()
    load_role(tmp_path / "actor", engine)
    assert layer.bias_of_experts.tolist() == [1.0, 2.0]


def lora_engine(folder: Path, seed: int) -> TrainEngine:
    case = Case(folder=str(folder))
    model = load_model(ModelConfig(path=case.folder, dtype="float64"), device="cpu")
    add_lora(model, LoraConfig(rank=2), seed=seed)
    engine = TrainEngine(model, case.engine, engine_of(case, None).optimizer.config, total_steps=None)
    for step in range(2):
        one_step(engine, case, step)
    return engine


def test_a_run_with_adapters_saves_only_what_it_trains(tiny_folder: Folders, tmp_path: Path) -> None:
    engine = lora_engine(tiny_folder("llama"), seed=0)
    save_role(tmp_path / "actor", engine)
    names = [name for name in SavedTensors(tmp_path / "actor").tensors if name.startswith("model/")]
    assert names
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    other = lora_engine(tiny_folder("llama"), seed=1)
    load_role(tmp_path / "actor", other)
    for name, tensor in role_tensors(engine.model).items():
        assert role_tensors(other.model)[name].detach().equal(tensor.detach()), name
    full = engine_of(Case(folder=str(tiny_folder("llama"))), alone("cpu"))
    with pytest.raises(ValueError, match="does not fit this model: it lacks model/model.embed_tokens.weight"):
        load_sharded(tmp_path / "actor", role_tensors(full.model))
