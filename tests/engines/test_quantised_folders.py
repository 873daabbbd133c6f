"""Model folders with quantised weights, read as the numbers that they stand for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from references.language_models import config as tiny_config
from references.language_models import load_plain, save_model
from references.quantised_folders import numbers_of, to_fp8, write_fp8, write_integers, write_mxfp4
from references.tiny_tiles import save_tiny_tiles
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.pretrained_config import load_model_config
from strop.engines.quantised.numbers import block_of_scales, mxfp4_numbers, scaled_numbers
from strop.engines.value_models import load_value_model

CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        }
    },
    "ignore": ["lm_head"],
}


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The scales of `scale_fmt: ue8m0`: float32 numbers that are powers of two."""
    return 2.0 ** scale.log2().ceil()


def _published(kind: str, plain: Path, folder: Path) -> Path:
    """A folder in the form in which models of a kind are published."""
    if kind == "gpt_oss":
        return write_mxfp4(plain, folder)
    if kind == "qwen3":  # one matrix of scales in bfloat16, as Qwen3-FP8 has them
        return write_fp8(plain, folder, block=(16, 16), of_scale=torch.Tensor.bfloat16)
    if kind == "llama":  # a scale per row, of compressed-tensors
        return write_fp8(plain, folder, block=(1, 0), end="_scale", settings=CHANNEL)
    return write_fp8(plain, folder, block=(20, 24), of_scale=power_of_two)  # cut off in both directions


@pytest.fixture(scope="module")
def published(
    tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The tiny model of a kind in its published form; `numbers_of` is the folder with its numbers."""
    root = tmp_path_factory.mktemp("published")

    def folder(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            plain = tiny_folder(kind)
            if kind == "gpt_oss":  # groups of 32
                shape = tiny_config(kind)
                shape.intermediate_size = 64
                save_model(shape, plain := root / "plain")
            _published(kind, plain, path)
        return path

    return folder


KINDS = ["gpt_oss", "deepseek_v3_experts", "qwen3", "qwen3_moe", "llama"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_folder_is_read_as_its_numbers(published: Callable[[str], Path], kind: str) -> None:
    folder = published(kind)
    module = load_model(ModelConfig(path=str(folder)), device="cpu").module
    expected = load_plain(numbers_of(folder), dtype=torch.float32).state_dict()
    assert module.state_dict().keys() == expected.keys()
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name]), name
    assert not hasattr(module.config, "quantization_config")


def test_transformers_reads_the_same(
    published: Callable[[str], Path], tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """It cannot cut blocks off, so that the FP8 one has none that are."""
    fp8 = write_fp8(tiny_folder("qwen3_moe"), tmp_path / "fp8", block=(16, 16))
    of_folder = {
        published("gpt_oss"): Mxfp4Config(dequantize=True),
        fp8: FineGrainedFP8Config(dequantize=True),
    }
    for folder, settings in of_folder.items():
        plain = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=settings
        )
        module = load_model(ModelConfig(path=str(folder)), device="cpu").module
        expected = plain.state_dict()
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("group", "bits", "is_packed"),
    [
        (4, 4, True),
        pytest.param(16, 4, True, marks=pytest.mark.slow),
        (0, 4, True),
        (8, 8, True),
        (0, 8, False),
    ],
)
def test_integers_of_compressed_tensors(tmp_path: Path, group: int, bits: int, is_packed: bool) -> None:
    shape = tiny_config("qwen3_moe")
    shape.moe_intermediate_size = 20 if group == 4 else 16  # 20 integers of 4 bits fill two words and a half
    save_model(shape, tmp_path / "plain")
    folder = write_integers(
        tmp_path / "plain", tmp_path / "integers", group=group, bits=bits, is_packed=is_packed
    )
    module = load_model(ModelConfig(path=str(folder)), device="cpu").module
    expected = load_plain(numbers_of(folder), dtype=torch.float32).state_dict()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("scale", ["_scale_inv", "_scale"])
def test_one_scale_of_a_whole_matrix(tiny_folder: Callable[[str], Path], tmp_path: Path, scale: str) -> None:
    settings = {"quant_method": "fp8", "activation_scheme": "static"}
    folder = write_fp8(tiny_folder("qwen3"), tmp_path / "fp8", block=(0, 0), end=scale, settings=settings)
    tensors = load_file(folder / "model.safetensors")
    used = "model.layers.0.mlp.up_proj."
    tensors[f"{used}weight{scale}"] = tensors[f"{used}weight{scale}"].reshape(())
    tensors[f"{used}activation_scale"] = torch.tensor(0.5)  # of activations, which are not quantised here
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    module = load_model(ModelConfig(path=str(folder)), device="cpu").module
    expected = load_file(numbers_of(folder) / "model.safetensors")
    assert torch.equal(module.get_parameter(f"{used}weight"), expected[f"{used}weight"])


def test_every_number_of_eight_bits_in_blocks_that_the_end_cuts_off() -> None:
    # All finite codes twice, and scales with all bits of a float32, in blocks of 7 x 5 of a matrix of 17 x 29.
    generator = torch.Generator().manual_seed(0)
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    weight = codes.repeat(2)[torch.randperm(508, generator=generator)][: 17 * 29].view(17, 29)
    weight = weight.view(torch.float8_e4m3fn)
    scale = torch.rand(3, 6, generator=generator) * 3e-3
    stored, numbers = to_fp8(weight.float() * 1.0, torch.ones(3, 6), (7, 5))
    assert torch.equal(stored.view(torch.uint8), weight.view(torch.uint8))
    for row in range(17):
        for column in range(29):
            numbers[row, column] *= scale[row // 7, column // 5]
    block = block_of_scales((17, 29), (3, 6), ((128, 128), (7, 5)))
    assert block == (7, 5)
    assert torch.equal(scaled_numbers(weight, scale, block), numbers)
    stacked = scaled_numbers(weight.expand(2, 17, 29), torch.stack((scale, 2 * scale)), block)
    assert torch.equal(stacked, torch.stack((numbers, 2 * numbers)))


def test_scales_that_are_exponents_alone() -> None:
    exponents = torch.tensor([[0], [127], [130], [254]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    numbers = scaled_numbers(torch.full((4, 3), 1.5).to(torch.float8_e4m3fn), exponents, (1, 3))
    expected = torch.tensor([1.5 * 2.0**-127, 1.5, 12.0, 1.5 * 2.0**127])
    assert torch.equal(numbers, expected[:, None].expand(4, 3))


@pytest.mark.parametrize(
    ("weight", "scale", "block"),
    [
        ((300, 200), (3, 2), (128, 128)),
        ((100, 90), (1, 1), (100, 90)),
        ((300, 200), (300, 1), (1, 200)),
        ((300, 200), (), (300, 200)),
        ((4, 300, 200), (4, 3, 2), (128, 128)),
        ((4, 300, 200), (4, 1, 1), (300, 200)),
        ((4, 300, 200), (1,), (300, 200)),
        ((300, 100), (3, 1), (128, 100)),  # no block is larger than the matrix
        ((300, 200), (2, 2), None),  # of another matrix
        ((300, 200), (300,), None),
        ((4, 300, 200), (3, 2), None),
        ((300,), (1,), None),
    ],
)
def test_scales_belong_to_a_weight_by_their_shape(
    weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None
) -> None:
    assert block_of_scales(weight, scale, ((128, 128),)) == block


def test_every_number_of_four_bits() -> None:
    # Codes 0 to 15 in order, then in reverse; by the standard code 1 is 0.5, the smallest, and 9 is -0.5.
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = positive + [-value for value in positive]
    codes = [*range(16), *reversed(range(16))]
    blocks = torch.tensor([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)])
    blocks = blocks.to(torch.uint8).view(1, 1, 1, 16).expand(1, 5, 1, 16)
    scales = torch.tensor([127, 120, 255, 0, 252], dtype=torch.uint8).view(1, 5, 1)
    numbers = mxfp4_numbers(blocks, scales, torch.bfloat16)
    assert numbers.shape == (1, 32, 5)
    assert numbers[0, :, 0].tolist() == [values[code] for code in codes]
    assert numbers[0, :, 1].tolist() == [values[code] / 128 for code in codes]
    assert numbers[0, :, 2].isnan().all()  # refused behind it, by check_finite
    assert numbers[0, :, 3].tolist() == [values[code] * 2.0**-127 for code in codes]
    assert numbers[0, :, 4].tolist() == [values[code] * 2.0**125 for code in codes]
    assert torch.equal(mxfp4_numbers(blocks, scales, torch.float32)[0, :, 3:], numbers[0, :, 3:].float())


def test_numbers_of_experts_that_fit_in_bfloat16_are_read_in_it_for_a_frozen_model(
    published: Callable[[str], Path],
) -> None:
    folder = published("gpt_oss")
    config = ModelConfig(path=str(folder), dtype="bfloat16")
    module = load_model(config, device="cpu", holds_half=True).module
    expected = load_plain(numbers_of(folder), dtype=torch.float32)
    halves = {name for name, parameter in module.named_parameters() if parameter.dtype == torch.bfloat16}
    assert {"model.layers.0.self_attn.q_proj.weight"} < halves
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.float(), expected.get_parameter(name)), name


def test_scaled_numbers_are_read_in_float32_and_then_rounded(published: Callable[[str], Path]) -> None:
    folder = published("qwen3")
    config = ModelConfig(path=str(folder), dtype="bfloat16")
    weight = load_model(config, device="cpu").module.get_parameter("model.layers.0.mlp.up_proj.weight")
    expected = load_file(numbers_of(folder) / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(expected.bfloat16().float(), expected)
    assert torch.equal(weight, expected)
    assert load_model_config(config).dtype == torch.float32  # `strop plan` asks whether bfloat16 holds them


def test_a_line_says_once_that_weights_were_dequantised(
    published: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.symlink_to(published("gpt_oss"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            load_model(ModelConfig(path=str(folder)), device="cpu")
    (line,) = [record.getMessage() for record in caplog.records if str(folder) in record.getMessage()]
    assert line == (
        f"{folder}: 4 of its weights are quantised (MXFP4): they are read as the numbers that they stand for, in "
        f"float32, and saved so"
    )


def test_scales_may_lie_in_another_file(published: Callable[[str], Path], tmp_path: Path) -> None:
    folder = published("qwen3")
    tensors = load_file(folder / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale_inv")}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    files = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": scales}
    for file, part in files.items():
        save_file(part, tmp_path / file, metadata={"format": "pt"})
    places = {name: file for file, part in files.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    module = load_model(ModelConfig(path=str(tmp_path)), device="cpu").module
    expected = load_file(numbers_of(folder) / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(module.get_parameter(name), expected[name])


def test_a_value_model_of_a_quantised_language_model_has_its_numbers_and_a_head_of_zeros(
    published: Callable[[str], Path],
) -> None:
    folder = published("qwen3_moe")
    module = load_value_model(ModelConfig(path=str(folder)), device="cpu").module
    expected = load_plain(numbers_of(folder), dtype=torch.float32).state_dict()
    weights = module.state_dict()
    assert not weights.pop("score.weight").any()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name


def test_a_language_model_within_a_model_of_images(tmp_path: Path) -> None:
    """Kimi-K2.5 says it in the configuration of its language model."""
    plain = save_tiny_tiles("kimi_k25", tmp_path / "plain")
    folder = write_integers(plain, tmp_path / "integers", group=4, bits=4, is_packed=True)
    settings = json.loads((folder / "config.json").read_text())
    settings["text_config"]["quantization_config"] = settings.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(settings))
    model = load_model(ModelConfig(path=str(folder)), device="cpu")
    expected = load_model(ModelConfig(path=str(numbers_of(folder))), device="cpu").module.state_dict()
    weights = model.module.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    model.save(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()


def test_words_for_another_number_of_columns_are_refused(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = write_integers(tiny_folder("qwen3"), tmp_path / "integers", group=16, bits=4, is_packed=True)
    wrong = {f"{WEIGHT}_shape": torch.tensor([48, 24])}
    config = _changed(folder, tmp_path / "changed", lambda tensors: tensors.update(wrong))
    with pytest.raises(
        ValueError, match=rf"has {WEIGHT}_packed with shape \[48, 4\] for 24 columns of 4 bits; fetch"
    ):
        load_model(config, device="cpu")


def test_generation_settings_and_the_name_of_the_folder_are_kept(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = write_fp8(tiny_folder("llama"), tmp_path / "fp8", block=(16, 16))
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.25, "eos_token_id": 5}'
    )
    module = load_model(ModelConfig(path=str(folder)), device="cpu").module
    settings = module.generation_config
    assert (settings.do_sample, settings.temperature, settings.eos_token_id) == (True, 0.25, 5)
    assert module.config.name_or_path == str(folder)


def _changed(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> ModelConfig:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return ModelConfig(path=str(to))


WEIGHT = "model.layers.1.mlp.up_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        (
            "qwen3",
            lambda tensors: tensors.pop(f"{WEIGHT}_scale_inv"),
            rf"has {WEIGHT}, stored as F8_E4M3, and no scale for it \({WEIGHT}_scale_inv or {WEIGHT}_scale\)",
        ),
        (
            "qwen3",
            lambda tensors: tensors.update({f"{WEIGHT}_scale_inv": torch.ones(2, 3)}),
            rf"has {WEIGHT}_scale_inv with shape \[2, 3\] of F32 for {WEIGHT} with shape \[48, 32\], and its config",
        ),
        (
            "qwen3",
            lambda tensors: tensors.update({f"{WEIGHT}_scale_inv": torch.ones(3, 2, dtype=torch.uint8)}),
            rf"has {WEIGHT}_scale_inv with shape \[3, 2\] of U8",
        ),
        (
            "gpt_oss",
            lambda tensors: tensors.pop(f"{EXPERTS}_scales"),
            rf"and {EXPERTS}_scales missing, but MXFP4",
        ),
        (
            "gpt_oss",
            lambda tensors: tensors.update({f"{EXPERTS}_scales": torch.ones(4, 32, 1, dtype=torch.uint8)}),
            rf"has {EXPERTS}_blocks with shape \[4, 32, 2, 16\] and {EXPERTS}_scales with shape \[4, 32, 1\]",
        ),
        (
            "gpt_oss",
            lambda tensors: tensors[f"{EXPERTS}_scales"].fill_(255),
            "has a NaN or an infinity in model.layers.0.mlp.experts.down_proj",
        ),
        (
            "gpt_oss",
            lambda tensors: tensors.update({WEIGHT: torch.ones(3, 2, dtype=torch.int8)}),
            rf"has quantised weights \({WEIGHT} is stored as I8\)",
        ),
    ],
)
def test_what_is_no_such_weight_is_refused_by_name(
    published: Callable[[str], Path],
    tmp_path: Path,
    kind: str,
    change: Callable[[dict[str, torch.Tensor]], Any],
    sentence: str,
) -> None:
    config = _changed(published(kind), tmp_path / "changed", change)
    with pytest.raises(ValueError, match=sentence):
        load_model(config, device="cpu")
