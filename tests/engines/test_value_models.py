"""Models with a head that gives one number per token: critics and reward models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3Config,
    JambaConfig,
    Qwen2VLConfig,
)

from references.language_models import SUPPORTED, save_tiny
from references.token_passes import of_values, values_of
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model_support.parity import check_packed
from strop.engines.packing import make_rows
from strop.engines.training import TrainEngine
from strop.engines.value_models import load_value_model, padding_token
from strop.workers.reward_model import load_reward_model

pytestmark = pytest.mark.usefixtures("float64_models")

Folder = Callable[[str], Path]


def load(path: Path, dtype: str = "float64") -> CausalLM:
    return load_value_model(ModelConfig(path=str(path), dtype=dtype), device="cpu")  # type: ignore[arg-type]


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 61, (n,), generator=generator) for n in (9, 1, 14, 6)]


def plain_scores(path: Path) -> list[float]:
    """The classifier of transformers, one text at a time."""
    plain = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64).eval()
    with torch.no_grad():
        return [float(plain(input_ids=text[None]).logits[0, 0]) for text in texts()]


@pytest.mark.parametrize("kind", ["qwen3_score", "llama_score", "gpt2_score", "opt_score", "phi_score"])
def test_the_score_of_a_text_is_that_of_transformers(tiny_folder: Folder, kind: str) -> None:
    model = load_reward_model(ModelConfig(path=str(tiny_folder(kind)), dtype="float64"), device="cpu")
    assert model.head_weight.shape == (1, 32)
    rows = make_rows(texts(), [torch.tensor([5])] * 4)
    for max_tokens in (1000, 14):
        scores = values_of(model, rows, max_tokens=max_tokens)
        torch.testing.assert_close(scores.tolist(), plain_scores(tiny_folder(kind)), rtol=1e-10, atol=1e-10)


def test_values_belong_to_the_states_before_the_tokens(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3_score")
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    prompt, response = texts()[0], texts()[2]
    with torch.no_grad():
        hidden = plain.base_model(input_ids=torch.cat([prompt, response])[None]).last_hidden_state[0]
        expected = plain.score(hidden)[len(prompt) - 1 : -1, 0]
    values = values_of(load(folder), make_rows([prompt], [response]), max_tokens=100)
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_any_causal_model_gets_a_head_of_zeros(
    tiny_folder: Folder, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_folder(kind)
    state = torch.get_rng_state()
    model = load(folder)
    assert torch.equal(torch.get_rng_state(), state)
    assert not caplog.records  # the head is meant to be missing
    rows = make_rows(texts(), texts())
    assert values_of(model, rows, max_tokens=50).tolist() == [0.0] * 30
    own = AutoModelForCausalLM.from_pretrained(tiny_folder(kind), dtype=torch.float64)
    body = dict(own.base_model.named_parameters())
    ours = dict(model.module.base_model.named_parameters())  # type: ignore[union-attr]
    assert ours.keys() == body.keys()
    assert all(torch.equal(ours[name], body[name]) for name in body)


def test_a_critic_learns_a_value_and_saves_an_ordinary_classifier(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    engine = TrainEngine(
        load(tiny_folder("llama")),
        EngineConfig(max_tokens_per_device=40),
        OptimizerConfig(lr=0.02, weight_decay=0.0),
        total_steps=None,
    )
    rows = make_rows(texts(), texts())
    returns = torch.linspace(-1, 1, 30, dtype=torch.float64)

    def loss(values: Tensor, token_index: Tensor) -> Tensor:
        return (values - returns[token_index]).square().sum() / 30

    losses = []
    for _ in range(40):
        losses.append(float(engine.accumulate(rows, of_values(loss))))
        engine.step()
    assert losses[0] == pytest.approx(float(returns.square().mean()))
    assert losses[-1] < 0.2 * losses[0]
    engine.save_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    rows = make_rows(texts(), [torch.tensor([5])] * 4)
    torch.testing.assert_close(values_of(engine, rows).tolist(), plain_scores(tmp_path), rtol=1e-9, atol=1e-9)
    again = load_value_model(ModelConfig(path=str(tmp_path), dtype="float64"), device="cpu")
    assert torch.equal(values_of(again, rows, max_tokens=50), values_of(engine, rows))


def test_a_reward_model_must_be_a_classifier_with_one_label(tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="qwen3' is a Qwen3ForCausalLM; give the folder of a sequence-class"):
        load_reward_model(ModelConfig(path=str(tiny_folder("qwen3"))), device="cpu")
    folder = Path(shutil.copytree(tiny_folder("qwen3_score"), tmp_path / "three"))
    config = json.loads((folder / "config.json").read_text())
    labels = {str(i): f"LABEL_{i}" for i in range(3)}
    (folder / "config.json").write_text(json.dumps({**config, "id2label": labels}))
    for function in (load_reward_model, load_value_model):
        with pytest.raises(
            ValueError, match="three' is a classifier with 3 labels; a value or reward model has"
        ):
            function(ModelConfig(path=str(folder)), device="cpu")


def test_architectures_without_a_classifier_are_refused(tmp_path: Path) -> None:
    save_tiny("granite", tmp_path)
    with pytest.raises(
        ValueError, match="is a granite, which transformers has in no form with a head of one"
    ):
        load(tmp_path)


def test_missing_body_weights_are_named(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "broken"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match="has no weights for model.norm.weight of LlamaForSequenceClassification"
    ):
        load(folder)


def test_a_classifier_with_code_of_its_own_need_not_name_a_padding_token(tmp_path: Path) -> None:
    code = "from transformers import PreTrainedConfig\n\nclass OwnConfig(PreTrainedConfig):\n    model_type = 'own'\n"
    (tmp_path / "configuration_own.py").write_text(code)
    settings = {
        "model_type": "own",
        "architectures": ["OwnForSequenceClassification"],
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig"},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert padding_token(ModelConfig(path=str(tmp_path), trust_remote_code=True)) is None
    (tmp_path / "config.json").write_text(json.dumps({**settings, "pad_token_id": 7}))
    assert padding_token(ModelConfig(path=str(tmp_path), trust_remote_code=True)) == 7


def test_a_classifier_without_its_head_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    """As one is whose head has another name: every score would be 0."""
    load(tiny_folder("llama")).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["value_head.weight"] = tensors.pop("score.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"has no weights for score\.weight of LlamaForSequenceClassification, which"
    ):
        load(tmp_path)


def test_layers_that_packed_computation_does_not_have_are_refused(tmp_path: Path) -> None:
    save_tiny("doge_score", tmp_path)
    module = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with pytest.raises(ValueError, match="DogeForSequenceClassification gives other hidden states on packed"):
        check_packed(module, torch.device("cpu"))


def test_float32_values_are_near(tiny_folder: Folder) -> None:
    rows = make_rows(texts(), texts())
    exact = values_of(load(tiny_folder("qwen3_score")), rows, max_tokens=100)
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.05)):
        near = values_of(load(tiny_folder("qwen3_score"), dtype), rows, max_tokens=100)
        assert near.dtype == torch.float32
        torch.testing.assert_close(near.double(), exact, rtol=tolerance, atol=tolerance)


def test_families_and_images_that_a_critic_cannot_have_are_refused_from_the_configuration(
    tmp_path: Path,
) -> None:
    for shape, sentence in (
        (
            Qwen2VLConfig(),
            r"vision-language model \(qwen2_vl\), and critics and reward models read text alone",
        ),
        (Gemma3Config(), r"vision-language model \(gemma3\)"),
        (JambaConfig(), "is a JambaForSequenceClassification, which has layers"),
    ):
        shape.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=sentence):
            load_value_model(ModelConfig(path=str(tmp_path)), device="cpu")
