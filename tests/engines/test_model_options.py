"""Settings, tokenizer, template and modules of the user's own, beside a model folder that stays as it is."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.pretrained_config import load_model_config
from strop.engines.tokenizer import load_tokenizer
from strop.engines.value_models import load_value_model
from strop.utils import trust


def with_options(folder: Path, **options: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), dtype="float32", **options)


@pytest.mark.parametrize("load", [load_model, load_value_model])
def test_override_config_is_the_same_as_another_config_json(
    tiny_model: Path, tmp_path: Path, load: Any
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.5}))
    written = load(with_options(folder), device="cpu").module
    override = load(with_options(tiny_model, override_config={"rms_norm_eps": 0.5}), device="cpu").module
    plain = load(with_options(tiny_model), device="cpu").module
    assert override.config.rms_norm_eps == 0.5
    norms = [module.model.norm.variance_epsilon for module in (written, override, plain)]
    assert norms == [0.5, 0.5, settings["rms_norm_eps"]]
    override.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.rms_norm_eps == 0.5
    assert torch.equal(again.model.norm.weight, override.model.norm.weight)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ({"rms_norm_epss": 0.5}, "no such setting; the nearest is rms_norm_eps"),
        ({"rms_norm_eps": "big"}, "is 'big', but in this model it is"),
        ({"use_cache": 1}, "is 1, but in this model it is true"),
        ({"attn_implementation": "eager"}, "set model.attn_implementation"),
        ({"model_type": "llama"}, "another kind of model"),
        ({"rope_theta": "big"}, "rope_theta is 'big': give a number"),
        ({"rope_scaling": 4.0}, "rope_scaling is 4.0: give a mapping"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        (
            {"rope_scaling": {"rope_type": "yarm", "factor": 2.0}},
            "^model.override_config does not fit this model: its rope_type is 'yarm', and there are default, linear, ",
        ),
    ],
)
def test_settings_that_the_model_does_not_have_are_refused(
    tiny_model: Path, override: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_model_config(with_options(tiny_model, override_config=override))


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("override", "rope"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
        ({"rope_scaling": _YARN}, {**_YARN, "rope_theta": 7e4}),
        ({"rope_scaling": None, "rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_parameters": _YARN}, {**_YARN, "rope_theta": 7e4}),
        ({"rope_parameters": {**_YARN, "rope_theta": 5e5}}, {**_YARN, "rope_theta": 5e5}),
    ],
)
@pytest.mark.parametrize("is_older", [True, False])
def test_rotary_embeddings_are_changed_under_any_name_whatever_names_the_folder_has(
    tiny_model: Path, tmp_path: Path, override: dict[str, Any], rope: dict[str, Any], is_older: bool
) -> None:
    settings = json.loads((tiny_model / "config.json").read_text())
    linear = {"rope_type": "linear", "factor": 2.0}
    if is_older:
        del settings["rope_parameters"]
        settings |= {"rope_theta": 7e4, "rope_scaling": linear}
    else:
        settings["rope_parameters"] = {**linear, "rope_theta": 7e4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert load_model_config(with_options(tmp_path)).rope_parameters == {**linear, "rope_theta": 7e4}
    changed = load_model_config(with_options(tmp_path, override_config=override)).rope_parameters
    assert {key: value for key, value in changed.items() if value is not None} == rope


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_kind_of_rotary_embeddings_that_there_is_not_is_named(tmp_path: Path, per_layer: bool) -> None:
    shape = Gemma3TextConfig(num_hidden_layers=2)
    shape.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["rope_parameters"]["full_attention"]["rope_type"] = "ntk"
    if not per_layer:
        settings |= {"model_type": "llama", "rope_parameters": settings["rope_parameters"]["full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(
        ValueError, match="has a config.json that does not describe a model: its rope_type is 'ntk'"
    ):
        load_model_config(with_options(tmp_path))


def test_one_base_for_several_rotary_embeddings_is_refused(tmp_path: Path) -> None:
    shape = Gemma3TextConfig(num_hidden_layers=2)
    shape.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="rope_theta: this model has a rotary embedding for each kind of layers"
    ):
        load_model_config(with_options(tmp_path, override_config={"rope_theta": 1e6}))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "flash_attention_2",
            "with sdpa FlashAttention's kernel in PyTorch computes .*; choose sdpa or eager",
        ),
        ("flex_attention", "no backward pass on a CPU"),
        ("kernels-community/flash-attn3", "no kernel of that name"),
    ],
)
def test_attention_that_is_not_here_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"model.attn_implementation is '{name}'.*{reason}"):
        ModelConfig(attn_implementation=name)


def test_sizes_that_do_not_fit_the_weights_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="holds no loadable causal language model"):
        load_model(with_options(tiny_model, override_config={"intermediate_size": 96}), device="cpu")


def test_the_tokenizer_and_template_may_come_from_elsewhere(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model / name, folder)
    with pytest.raises(ValueError, match="has no tokenizer files"):
        load_tokenizer(with_options(folder))
    tokenizer = load_tokenizer(with_options(folder, tokenizer_path=str(tiny_model)))
    assert tokenizer.get_vocab() == load_tokenizer(with_options(tiny_model)).get_vocab()
    (tmp_path / "own.jinja").write_text("A{{ messages[0].content }}")
    for chosen in ("A{{ messages[0].content }}", str(tmp_path / "own.jinja")):
        own = load_tokenizer(with_options(tiny_model, chat_template=chosen))
        assert own.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "Ax"
    with pytest.raises(ValueError, match=r"'none\.jinja', which is no file"):
        load_tokenizer(with_options(tiny_model, chat_template="none.jinja"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": 3}))
    with pytest.raises(ValueError, match=r"has \d+ tokens, and the model in .* knows 3"):
        load_tokenizer(with_options(folder, tokenizer_path=str(tiny_model)))


def test_a_module_is_imported_before_the_model_and_with_leave_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "external_model_lib.py").write_text("SEEN = True\n")
    (tmp_path / "external_broken_lib.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with trust.door():
        trust.close("runs/received")
        with pytest.raises(trust.UntrustedCode, match="external_model_lib"):
            load_model_config(with_options(tiny_model, external_lib="external_model_lib"))
    assert "external_model_lib" not in sys.modules
    load_model_config(with_options(tiny_model, external_lib="external_model_lib"))
    assert sys.modules.pop("external_model_lib").SEEN
    with pytest.raises(ValueError, match=r"external_broken_lib' cannot be imported \(ZeroDivisionError"):
        load_model_config(with_options(tiny_model, external_lib="external_broken_lib"))
