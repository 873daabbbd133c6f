"""Exports: what plain transformers loads is what was trained, and what is not is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_cases import Case, accumulate, engine_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from references.rank_processes import Ranks, run_ranks
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.moe.layers import is_choice_bias
from strop.engines.parallel.ranks import alone
from strop.engines.role_checkpoint import CONFIG_FOLDER, save_role
from strop.engines.training import TrainEngine
from strop.trainer import role_export
from strop.trainer.role_export import export_role

Folders = Callable[[str], Path]
IDS = torch.tensor([[5, 9, 2, 40, 7, 7, 33]])


@pytest.fixture
def with_tokenizer(
    tiny_folder: Folders, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Folders:
    """Folder of the tiny model of a kind, with some tokenizer."""

    def folder(kind: str) -> Path:
        path = tmp_path_factory.mktemp(kind) / "model"
        shutil.copytree(tiny_folder(kind), path)  # other tests use that folder too
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(path)
        return path

    return folder


def trained(case: Case, parallel: Any = None) -> TrainEngine:
    engine = engine_of(case, parallel)
    accumulate(engine, case, 0, range(3))
    assert not engine.step().skipped
    return engine


def log_probs(module: Any) -> Tensor:
    with torch.no_grad():
        return module.eval()(input_ids=IDS).logits.log_softmax(-1)


def plain(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})


def weights_of(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def save_on_two(ranks: Ranks, case: Case, folder: Path) -> dict[str, Any]:
    engine = trained(case, ranks.join())
    save_role(folder / "actor", engine)
    return {name: p.full_tensor().detach() for name, p in engine.model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_a_checkpoint_of_two_ranks_becomes_an_ordinary_folder(
    with_tokenizer: Folders, tmp_path: Path, kind: str
) -> None:
    case = Case(folder=str(with_tokenizer(kind)), dtype="float32")
    expected, _ = run_ranks(save_on_two, 2, case, tmp_path)
    result = export_role(tmp_path, tmp_path / "out", ModelConfig(path=case.folder))
    module = plain(tmp_path / "out")
    found = dict(module.named_parameters())
    assert found.keys() == expected.keys()
    assert all(found[name].equal(weight) for name, weight in expected.items()), "bit for bit"
    assert type(module) is type(plain(Path(case.folder)))
    assert result.num_tensors == len(expected), "a tied head is no tensor of its own"
    assert result.num_bytes == sum(4 * weight.numel() for weight in expected.values())
    assert result.difference < 1e-4
    assert result.rounding == 0
    kilobytes = result.num_bytes / 2**20
    assert result.describe() == (
        f"export ok: {len(expected)} tensors, {kilobytes:.2f} MiB, probe log-prob diff {result.difference:.4f}"
    )
    AutoTokenizer.from_pretrained(tmp_path / "out")
    assert not (tmp_path / ".exporting-out").exists()


def test_bfloat16_rounds_each_weight_once(with_tokenizer: Folders, tmp_path: Path) -> None:
    case = Case(folder=str(with_tokenizer("qwen3")), dtype="float32")
    engine = trained(case)
    save_role(tmp_path / "actor", engine)
    result = export_role(tmp_path, tmp_path / "out", ModelConfig(path=case.folder), dtype=torch.bfloat16)
    module = plain(tmp_path / "out", dtype="auto")
    found = dict(module.named_parameters())
    for name, weight in weights_of(engine).items():
        assert found[name].dtype == torch.bfloat16
        assert found[name].equal(weight.bfloat16()), name
    assert result.difference < 1e-4, "the proof is as sharp as in float32"
    assert result.rounding > 1e-3
    assert f"(rounding moves them by {result.rounding:.4f})" in result.describe()


def test_the_configuration_in_the_checkpoint_is_enough(
    with_tokenizer: Folders, tiny_model: Path, tmp_path: Path
) -> None:
    case = Case(folder=str(with_tokenizer("llama")), dtype="float32")
    engine = trained(case)
    save_role(tmp_path / "actor", engine)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "actor" / CONFIG_FOLDER)
    export_role(tmp_path, tmp_path / "out", ModelConfig(path="/moved/away"))
    assert dict(plain(tmp_path / "out").named_parameters())["lm_head.weight"].equal(
        weights_of(engine)["lm_head.weight"]
    )
    for name in ("config.json", "state.json"):
        for path in (tmp_path / "actor").rglob(name):
            path.unlink()
        problem = "does not say what model it holds" if name == "config.json" else "holds no actor"
        with pytest.raises(ValueError, match=problem):
            export_role(tmp_path, tmp_path / "again", ModelConfig(path="/moved/away"))
        assert not (tmp_path / "again").exists()


def test_a_checkpoint_that_has_a_model_folder_already_is_exported_from_it(
    with_tokenizer: Folders, tmp_path: Path
) -> None:
    case = Case(folder=str(with_tokenizer("qwen3")), dtype="float32")
    engine = trained(case)
    engine.save_model(tmp_path / "model")
    AutoTokenizer.from_pretrained(case.folder).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true}')
    result = export_role(tmp_path, tmp_path / "out", ModelConfig(path="/moved/away"), dtype=torch.bfloat16)
    assert dict(plain(tmp_path / "out").named_parameters())["model.norm.weight"].equal(
        weights_of(engine)["model.norm.weight"].bfloat16().float()
    )
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.7
    assert result.num_tensors == len(weights_of(engine))
    with pytest.raises(ValueError, match=r"holds no critic \(found: .*model.*\); give a checkp"):
        export_role(tmp_path, tmp_path / "critic", ModelConfig(path=case.folder), role="critic")


def test_a_critic_becomes_a_sequence_classification_folder(with_tokenizer: Folders, tmp_path: Path) -> None:
    case = Case(folder=str(with_tokenizer("qwen3")), dtype="float32", values=True)
    engine = trained(case)
    with torch.no_grad():
        engine.model.head_weight.normal_(generator=torch.Generator().manual_seed(0))
    save_role(tmp_path / "critic", engine)
    result = export_role(tmp_path, tmp_path / "out", ModelConfig(path=case.folder), role="critic")
    module = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (type(module).__name__, module.config.num_labels) == ("Qwen3ForSequenceClassification", 1)
    assert module.score.weight.equal(weights_of(engine)["score.weight"])
    assert "probe value diff" in result.describe()
    assert result.difference < 1e-4
    values = role_export.plain_probe(module, role_export.probe_sequences(engine.model))
    assert values.shape == (len(role_export.PROBE_LENGTHS),)
    assert values.abs().min() > 1e-3, "the comparison is of something"


def with_adapter(folder: Path, checkpoint: Path) -> tuple[TrainEngine, ModelConfig]:
    config = ModelConfig(path=str(folder), dtype="float32", lora=LoraConfig(rank=2))
    model = load_model(config, device="cpu")
    case = Case(folder=str(folder), dtype="float32")
    engine = TrainEngine(model, case.engine, OptimizerConfig(lr=0.05), total_steps=None)
    for step in range(2):
        accumulate(engine, case, step, range(3))
        assert not engine.step().skipped
    save_role(checkpoint / "actor", engine)
    return engine, config


def test_a_run_with_adapters_gives_its_merged_model(with_tokenizer: Folders, tmp_path: Path) -> None:
    for kind in ("qwen3", "gpt2"):
        folder, checkpoint = with_tokenizer(kind), tmp_path / kind
        engine, config = with_adapter(folder, checkpoint)
        sequences = role_export.probe_sequences(engine.model)
        expected = role_export.probe(engine.model, sequences)
        result = export_role(checkpoint, checkpoint / "out", config)
        module = plain(checkpoint / "out")
        assert result.difference < 1e-4
        assert {name for name, _ in module.named_parameters()} == {
            name for name, _ in plain(folder).named_parameters()
        }
        torch.testing.assert_close(role_export.plain_probe(module, sequences), expected, atol=1e-4, rtol=0)
        assert (log_probs(module) - log_probs(plain(folder))).abs().max() > 0.01, "the adapter does something"


def test_the_adapter_alone_is_a_peft_folder(with_tokenizer: Folders, tmp_path: Path) -> None:
    folder = with_tokenizer("llama")
    _, config = with_adapter(folder, tmp_path)
    merged = export_role(tmp_path, tmp_path / "merged", config)
    result = export_role(tmp_path, tmp_path / "adapter", config, adapter_only=True)
    names = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(names)
    assert "model.safetensors" not in names
    assert result.num_tensors == len(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert result.num_bytes < merged.num_bytes / 2
    from peft import PeftModel

    with_peft = PeftModel.from_pretrained(plain(folder), tmp_path / "adapter")
    torch.testing.assert_close(log_probs(with_peft), log_probs(plain(tmp_path / "merged")), atol=1e-4, rtol=0)
    save_role(tmp_path / "other" / "actor", trained(Case(folder=str(folder), dtype="float32")))
    with pytest.raises(ValueError, match="was trained without adapters"):
        export_role(tmp_path / "other", tmp_path / "x", config, adapter_only=True)


Damage = Callable[[Path], None]


def _swap(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    a, b = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    tensors[a], tensors[b] = tensors[b].clone(), tensors[a].clone()
    save_file(tensors, path, metadata={"format": "pt"})


def _drop(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def _add(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), "model.extra.weight": torch.zeros(2)}, path, metadata={"format": "pt"})


def _nan(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            _swap,
            r"gives other log-probs in plain transformers than in training \(largest difference 0\.\d+|[1-9]",
        ),
        (_drop, "the export lacks model.norm.weight when plain transformers loads it as Qwen3ForCausalLM"),
        (_add, "the export also holds model.extra.weight"),
        (_nan, "gives other log-probs in plain transformers than in training .largest difference nan"),
    ],
)
def test_an_export_that_is_not_the_model_is_refused_and_leaves_nothing(
    with_tokenizer: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage, problem: str
) -> None:
    case = Case(folder=str(with_tokenizer("qwen3")), dtype="float32")
    save_role(tmp_path / "actor", trained(case))
    save = role_export._save

    def save_wrong(model: Any, folder: Path, dtype: torch.dtype) -> None:
        save(model, folder, dtype)
        damage(folder)

    monkeypatch.setattr(role_export, "_save", save_wrong)
    with pytest.raises(ValueError, match=problem):
        export_role(tmp_path, tmp_path / "out", ModelConfig(path=case.folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor"]


def test_a_checkpoint_that_lacks_a_weight_is_refused(with_tokenizer: Folders, tmp_path: Path) -> None:
    case = Case(folder=str(with_tokenizer("qwen3")), dtype="float32")
    save_role(tmp_path / "actor", trained(case))
    # The configuration says that the head is not tied, and has other heads.
    config = tmp_path / "actor" / "config" / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "tie_word_embeddings": False, "num_key_value_heads": 4}))
    with pytest.raises(
        ValueError, match="does not fit this model: it lacks model/lm_head.weight; of another form:"
    ):
        export_role(tmp_path, tmp_path / "out", ModelConfig(path=case.folder))


def test_a_folder_that_is_taken_is_left_alone(with_tokenizer: Folders, tmp_path: Path) -> None:
    case = Case(folder=str(with_tokenizer("qwen3")), dtype="float32")
    save_role(tmp_path / "actor", trained(case, alone("cpu")))
    config = ModelConfig(path=case.folder)
    with pytest.raises(
        ValueError, match=r"actor is not empty \(it holds config, shard-00001.*\); give an absent"
    ):
        export_role(tmp_path, tmp_path / "actor", config)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file is a file"):
        export_role(tmp_path, tmp_path / "file", config)
    (tmp_path / "empty").mkdir()
    export_role(tmp_path, tmp_path / "empty", config)
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_large_models_are_cut_into_files_with_an_index(
    with_tokenizer: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_export, "_FILE_BYTES", "20KB")
    case = Case(folder=str(with_tokenizer("llama")), dtype="float32")
    engine = trained(case)
    save_role(tmp_path / "actor", engine)
    result = export_role(tmp_path, tmp_path / "out", ModelConfig(path=case.folder))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights_of(engine).keys()
    assert len(set(index["weight_map"].values())) > 2
    assert result.num_tensors == len(weights_of(engine))
    assert result.num_bytes == index["metadata"]["total_size"]


def test_thousands_are_set_apart() -> None:
    result = role_export.Export(
        folder=Path("x"), num_tensors=18867, num_bytes=int(438.1 * 2**30), difference=0.0004, rounding=0.0
    )
    assert result.describe() == "export ok: 18 867 tensors, 438.10 GiB, probe log-prob diff 0.0004"


def test_probe_sequences_stay_within_the_positions_of_the_model(with_tokenizer: Folders) -> None:
    model = load_model(ModelConfig(path=str(with_tokenizer("gpt2"))), device="cpu")
    assert [len(ids) for ids in role_export.probe_sequences(model)] == list(role_export.PROBE_LENGTHS)
    model.config.max_position_embeddings = 20
    sequences = role_export.probe_sequences(model)
    assert [len(ids) for ids in sequences] == [17, 20, 5]
    assert len(torch.cat(sequences).unique()) > 25, "many different tokens"
    assert int(torch.cat(sequences).max()) < 61


def test_a_difference_of_large_values_is_measured_by_their_size() -> None:
    assert role_export._largest(torch.tensor([1001.0, 2.0]), torch.tensor([1000.0, 2.0])) == pytest.approx(
        1e-3
    )
    assert role_export._largest(torch.tensor([0.25]), torch.tensor([0.5])) == 0.25


@pytest.mark.parametrize("kind", ["deepseek_v3_experts", "ernie4_5_moe", "afmoe"])
def test_biases_by_which_experts_are_chosen_are_exported_in_float32(
    with_tokenizer: Folders, tmp_path: Path, kind: str
) -> None:
    # transformers, vLLM and SGLang hold them in float32, and a bias of 10 rounded to bfloat16 moves by up to 0.03.
    folder = with_tokenizer(kind)
    weights = load_file(folder / "model.safetensors")
    name = next(filter(is_choice_bias, weights))
    weights[name] = 10 + 0.05 * torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(0))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig(path=str(folder), dtype="float32")
    engine = TrainEngine(
        load_model(config, device="cpu"), EngineConfig(), OptimizerConfig(), total_steps=None
    )
    save_role(tmp_path / "checkpoint" / "actor", engine)
    export_role(tmp_path / "checkpoint", tmp_path / "out", config, dtype=torch.bfloat16)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported[name], weights[name])
    types = {is_choice_bias(name): tensor.dtype for name, tensor in exported.items()}
    assert types == {True: torch.float32, False: torch.bfloat16}
