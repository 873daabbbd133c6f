"""The form of quantised weights from a configuration: which are read, and which are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from strop.engines.model_support.unsupported import check_unquantised
from strop.engines.quantised.scheme import Scheme, forget, scheme_of, without_entries

FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
BLOCK = FP8_WEIGHTS | {"strategy": "block", "block_structure": [128, 128]}


def shape(model_type: str = "llama", **settings: Any) -> PreTrainedConfig:
    """A configuration, with a `quantization_config` of these settings."""
    return AutoConfig.for_model(model_type, quantization_config=copy.deepcopy(settings))


def of_groups(*groups: dict[str, Any], **settings: Any) -> PreTrainedConfig:
    """One of compressed-tensors, with a group for each of these settings of weights."""
    config_groups = {f"group_{number}": {"weights": weights} for number, weights in enumerate(groups)}
    return shape(
        quant_method="compressed-tensors",
        config_groups=config_groups,
        **{"format": "float-quantized"} | settings,
    )


INT4_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FP8_TYPES = ("F8_E4M3", "F8_E5M2")
FP8 = Scheme(form="scaled", types=FP8_TYPES, name="FP8")
IN_BLOCKS = Scheme(form="scaled", types=FP8_TYPES, blocks=((128, 128),), name="FP8 in blocks of 128 x 128")
INT4 = Scheme(form="scaled", packed_bits=4, blocks=((1, 32),), name="INT4 in blocks of 1 x 32")
MXFP4 = Scheme(form="mxfp4", name="MXFP4")


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (shape("gpt_oss", quant_method="mxfp4", modules_to_not_convert=["lm_head"]), MXFP4),
        (shape(quant_method="fp8", weight_block_size=[128, 128], scale_fmt="ue8m0", fmt="e4m3"), IN_BLOCKS),
        (shape(quant_method="fp8", weight_block_size=None, activation_scheme="static"), FP8),
        (of_groups(FP8_WEIGHTS), FP8),
        (of_groups(FP8_WEIGHTS | {"strategy": "tensor"}, format="naive-quantized"), FP8),
        (of_groups(BLOCK, FP8_WEIGHTS), IN_BLOCKS),
        (of_groups(FP8_WEIGHTS, sparsity_config={"format": "dense"}), FP8),
        (of_groups(INT4_WEIGHTS, format="pack-quantized"), INT4),
        (of_groups(INT4_WEIGHTS | {"actorder": "static"}, format="pack-quantized"), INT4),
        (
            of_groups(FP8_WEIGHTS | {"type": "int"}, format="int-quantized"),
            Scheme(form="scaled", types=("I8",), name="INT8"),
        ),
    ],
)
def test_forms_that_are_read(config: PreTrainedConfig, scheme: Scheme) -> None:
    assert scheme_of(config) == scheme
    forget(config)
    assert "quantization_config" not in config.to_dict()
    assert scheme_of(config) is None
    check_unquantised(config, "model")
    assert (config.dtype == torch.float32) == (scheme.form == "scaled")


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (shape("llama", quant_method="mxfp4"), "mxfp4"),  # known of gpt-oss alone
        (shape(quant_method="fp8", weight_block_size=[128]), "fp8"),
        (shape(quant_method="fp8", weight_block_size="128"), "fp8"),
        (shape(quant_method="fp8", weight_block_size=[128, 0]), "fp8"),
        (shape(quant_method="awq"), "awq"),
        (shape(quant_method="bitsandbytes", load_in_4bit=True), "bitsandbytes"),
        (
            of_groups(FP8_WEIGHTS | {"num_bits": 4}, format="pack-quantized"),
            "compressed-tensors pack-quantized",
        ),
        (of_groups(FP8_WEIGHTS | {"num_bits": 4}), "compressed-tensors float-quantized"),
        (of_groups(FP8_WEIGHTS | {"type": "int"}), "compressed-tensors float-quantized"),
        (of_groups(FP8_WEIGHTS | {"symmetric": False}), "compressed-tensors float-quantized"),
        (of_groups(BLOCK | {"block_structure": "128x128"}), "compressed-tensors float-quantized"),
        (
            of_groups(FP8_WEIGHTS, transform_config={"config_groups": {"R1": {}}}),
            "compressed-tensors float-quantized",
        ),
        (
            of_groups(FP8_WEIGHTS, sparsity_config={"format": "sparse-24-bitmask"}),
            "compressed-tensors float-quantized",
        ),
        (of_groups(), "compressed-tensors float-quantized"),
        (shape(quant_method="compressed-tensors", config_groups=[FP8_WEIGHTS]), "compressed-tensors"),
    ],
)
def test_others_are_refused_by_name(config: PreTrainedConfig, method: str) -> None:
    assert scheme_of(config) is None
    with pytest.raises(
        ValueError, match=rf"quantization_config of its config.json: {method}\) in a form that is"
    ):
        check_unquantised(config, "model")


def test_no_entry_and_the_entry_of_the_first_versions_of_compressed_tensors() -> None:
    assert scheme_of(LlamaConfig()) is None
    older = LlamaConfig()
    older.compression_config = of_groups(FP8_WEIGHTS).quantization_config
    assert scheme_of(older) == FP8
    forget(older)
    assert not hasattr(older, "compression_config")


def test_the_entry_of_the_language_model_in_a_configuration() -> None:
    whole = AutoConfig.for_model("qwen3_vl")
    whole.text_config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert scheme_of(whole) == IN_BLOCKS
    forget(whole)
    assert scheme_of(whole) is None
    settings = {
        "text_config": {"quantization_config": {}, "hidden_size": 4},
        "compression_config": {},
        "dtype": "x",
    }
    assert without_entries(settings) == {"text_config": {"hidden_size": 4}, "dtype": "x"}
