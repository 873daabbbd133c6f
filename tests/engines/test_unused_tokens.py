"""Rows of a padded embedding for which the tokenizer has no token are never sampled; log-probs are of the rest."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.algorithms.distillation_config import DistillationConfig
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.role_checkpoint import save_role
from strop.engines.training import Engine, TrainEngine
from strop.engines.unused_tokens import unused_token_ids
from strop.protocol import columns
from strop.rollout.config import RolloutConfig
from strop.rollout.engine_group import EngineContext
from strop.rollout.native.cpu.steps import fused_step
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling, TokenOutput
from strop.trainer.role_export import export_role
from strop.workers.config import ReferenceConfig, TeacherConfig
from strop.workers.models import TrainingInit
from strop.workers.reference import ReferenceWorker
from strop.workers.sft import SupervisedWorker
from strop.workers.teacher import TeacherWorker

NUM_UNUSED = 20


@pytest.fixture(scope="module")
def padded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with more rows, whose logits are as large as those of the others."""
    folder = tmp_path_factory.mktemp("padded") / "model"
    shutil.copytree(tiny_model, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    size = model.config.vocab_size
    assert size == len(AutoTokenizer.from_pretrained(folder)), "else the number below is another"
    model.resize_token_embeddings(size + NUM_UNUSED, mean_resizing=False)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[size:] = weight[:NUM_UNUSED] + 0.1
    model.save_pretrained(folder)
    return folder


def config_of(folder: Path, **changes: object) -> ModelConfig:
    return ModelConfig(path=str(folder), dtype="float32", **changes)  # type: ignore[arg-type]


def used(folder: Path) -> int:
    return len(AutoTokenizer.from_pretrained(folder))


def plain_log_probs(folder: Path, ids: list[int], temperature: float) -> torch.Tensor:
    """Log-probs of all tokens but the first among those of the tokenizer, by plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1, : used(folder)].double()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def sampled(model: CausalLM, *, temperature: float, count: int) -> list[TokenOutput]:
    engine = NativeEngine(model, max_running=16)

    async def answers() -> list[TokenOutput]:
        asks = (
            engine.generate(str(n), [5, 6, 7], Sampling(key=n, temperature=temperature, max_tokens=30))
            for n in range(count)
        )
        return list(await asyncio.gather(*asks))

    return asyncio.run(answers())


def scored(model: CausalLM, rows: list[list[int]], temperature: float) -> torch.Tensor:
    data = make_rows([torch.tensor(row[:1]) for row in rows], [torch.tensor(row[1:]) for row in rows])
    engine = Engine(model, EngineConfig(), is_frozen=True)
    return engine.map_tokens(data, lambda t: {"log_probs": t.log_probs(temperature=temperature)[0]})[
        "log_probs"
    ]


@pytest.mark.parametrize("kind", ["sdpa", "eager"])  # compiled steps, and the model's own forward pass
def test_no_row_without_a_token_is_sampled_and_both_sides_know_it(padded: Path, kind: str) -> None:
    model = load_model(config_of(padded, attn_implementation=kind), device="cpu")
    if shutil.which("gcc"):
        assert (fused_step(model) is None) == (kind == "eager")
    outputs = sampled(model, temperature=20.0, count=60)
    seen = {token for output in outputs for token in output.token_ids}
    assert len(seen) > 0.9 * used(padded), "at this temperature nearly every token comes"
    assert max(seen) < used(padded)
    row = [5, 6, 7, *outputs[0].token_ids]
    expected = plain_log_probs(padded, row, 20.0)
    torch.testing.assert_close(torch.tensor(outputs[0].log_probs), expected[2:].float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(scored(model, [row], 20.0), expected.float(), rtol=0, atol=1e-4)


def test_tokens_that_end_generation_are_used_wherever_they_stand(padded: Path, tmp_path: Path) -> None:
    tokenizer, size = AutoTokenizer.from_pretrained(padded), used(padded)
    folder = tmp_path / "model"
    shutil.copytree(padded, folder)
    assert unused_token_ids(tokenizer, size + 3, str(folder)) == (size, size + 1, size + 2)
    assert unused_token_ids(tokenizer, size, str(folder)) == ()
    assert unused_token_ids(tokenizer, size - 4, str(folder)) == ()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, size + 1]}))
    assert unused_token_ids(tokenizer, size + 3, str(folder)) == (size, size + 2)
    tokenizer.add_tokens(["<|more|>"])
    assert unused_token_ids(tokenizer, size + 3, str(folder)) == (size + 2,)


def test_a_folder_without_a_tokenizer_uses_all_rows(padded: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(padded / name, tmp_path / name)
    assert load_model(config_of(tmp_path), device="cpu").never_sampled == ()


def test_a_reference_gives_probability_to_the_tokens_of_the_policy(padded: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    other.mkdir()
    for name in ("config.json", "model.safetensors"):  # no tokenizer of its own
        shutil.copy(padded / name, other / name)
    reference = ReferenceWorker(config_of(padded), ReferenceConfig(path=str(other)), device="cpu")
    ids = [5, 6, 7, 8, 9]
    data = make_rows([torch.tensor(ids[:1])], [torch.tensor(ids[1:])])
    data.meta_info["temperature"] = 1.0
    found = columns.flat(reference.compute_ref_log_prob(data).tensors()["ref_log_prob"])
    torch.testing.assert_close(found, plain_log_probs(padded, ids, 1.0).float(), rtol=0, atol=1e-4)


def test_a_teacher_names_only_tokens_that_the_policy_can_produce(padded: Path) -> None:
    distillation = DistillationConfig(kind="forward_kl", top_k=used(padded))
    teacher = TeacherWorker(config_of(padded), TeacherConfig(path=str(padded)), distillation, device="cpu")
    data = make_rows([torch.tensor([5])], [torch.tensor([6, 7])])
    data.meta_info["temperature"] = 1.0
    found = teacher.compute_teacher_top_k(data).tensors()
    ids = columns.flat(found["teacher_ids"])
    assert sorted(ids[0].tolist()) == list(range(used(padded)))
    assert float(columns.flat(found["teacher_logprobs"]).exp().sum(-1).sub(1).abs().max()) < 1e-5
    too_many = DistillationConfig(kind="forward_kl", top_k=used(padded) + 1)
    with pytest.raises(ValueError, match=f"share {used(padded)} tokens"):
        TeacherWorker(config_of(padded), TeacherConfig(path=str(padded)), too_many, device="cpu")


def test_fine_tuning_makes_such_rows_less_likely(padded: Path) -> None:
    worker = SupervisedWorker(
        config_of(padded), EngineConfig(), OptimizerConfig(lr=1e-3), TrainingInit(device="cpu", num_updates=1)
    )
    ids = [5, 6, 7, 8]
    found = scored(worker.engine.model, [ids], 1.0)
    module = AutoModelForCausalLM.from_pretrained(padded)
    with torch.no_grad():
        whole = module(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    expected = whole.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].float()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_of_their_own_process_are_told(
    padded: Path, tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = importlib.import_module(f"strop.rollout.{engine}.launch")
    monkeypatch.setattr(launch, f"start_{engine}", AsyncMock())
    place = EngineContext(
        model=config_of(padded), rollout=RolloutConfig(engine=engine), device="cpu", version=0, trained=None,
        max_tokens=64, logs=tmp_path, rank=0,
    )  # fmt: skip
    asyncio.run(getattr(launch, f"make_{engine}")(place))
    _, settings, _ = getattr(launch, f"start_{engine}").call_args.args
    assert settings.unused_tokens == tuple(range(used(padded), used(padded) + NUM_UNUSED))


def test_an_export_is_compared_over_all_rows(padded: Path, tmp_path: Path) -> None:
    config = config_of(padded, lora=LoraConfig(rank=2))
    engine = TrainEngine(
        load_model(config, device="cpu"), EngineConfig(), OptimizerConfig(), total_steps=None
    )
    save_role(tmp_path / "actor", engine)
    assert export_role(tmp_path, tmp_path / "out", config).difference < 1e-4
