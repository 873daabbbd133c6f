"""Settings and models that the Megatron engine does not have, refused before anything starts."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import transformers

from strop.config import load_config
from strop.engines.config import EngineConfig, MegatronConfig, OptimizerConfig
from strop.engines.megatron import checks
from strop.engines.megatron.checks import check_installed, check_model, check_settings
from strop.trainer.checks.parallel import check
from strop.trainer.config import Config


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.lora.rank=8"], "model.lora.rank is 8, which actor.engine.kind=megatron does not have"),
        (["model.use_liger=true"], "model.use_liger is True, which actor.engine.kind=megatron"),
        (["model.dtype=float16"], "model.dtype is float16, which actor.engine.kind=megatron"),
        (["model.dtype=float64"], "set actor.engine.megatron.distributed_optimizer=false"),
        (["actor.optim.name=muon"], "actor.optim.name is muon, which actor.engine.kind=megatron"),
        (["actor.engine.compile=true"], "actor.engine.compile is True, which actor.engine.kind=megatron"),
        (
            [
                "actor.engine.pipeline_schedule=zero_bubble", "actor.engine.pipeline_parallel=2", "resources.ranks=2",
                "resources.runtime=ray",
            ],
            "actor.engine.pipeline_schedule is zero_bubble, which actor.engine.kind=megatron does not have",
        ),
        (["actor.engine.offload=all"], "actor.engine.offload is all, .* use none or optimizer"),
        (
            ["actor.engine.sequence_parallel=2", "resources.ranks=2", "resources.runtime=ray"],
            "actor.engine.sequence_parallel is 2, which actor.engine.kind=megatron",
        ),
        (
            ["actor.engine.megatron.transformer_config={moe_z_loss_coeff: 0.001}"],
            "moe_z_loss_coeff to 0.001, but routers have actor.moe and sft.moe .*: remove it",
        ),
        (
            ["actor.engine.megatron.transformer_config={moe_enable_routing_replay: true}"],
            "moe_enable_routing_replay to True, but experts are given with the rows",
        ),
        (
            ["actor.engine.megatron.transformer_config={moe_router_fusion: true}"],
            "actor.engine.megatron.transformer_config sets moe_router_fusion to True",
        ),
        (
            ["actor.engine.megatron.transformer_config={recompute_modules: [core_attn, moe]}"],
            r"recompute_modules=\['core_attn', 'moe'\], .* use model.gradient_checkpointing=true",
        ),
        (
            ["algorithm.adv_estimator=gae", "critic.engine.kind=megatron", "critic.lora.rank=8"],
            "critic.lora.rank is 8, which critic.engine.kind=megatron does not have",
        ),
        (
            ["reward_model.path=r", "reward_model.engine.kind=megatron", "reward_model.dtype=float16"],
            "reward_model.dtype is float16, which reward_model.engine.kind=megatron",
        ),
        (
            [
                "algorithm.use_kl_loss=true", "reference.engine.kind=megatron", "resources.runtime=ray",
                "resources.ranks=2", "actor.engine.tensor_parallel=2",
            ],
            "reference.engine.tensor_parallel is 1 and actor.engine.tensor_parallel is 2, but megatron-core divides",
        ),
    ],
)  # fmt: skip
def test_settings_that_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], sentence: str
) -> None:
    monkeypatch.setattr("strop.trainer.checks.parallel.check_installed", lambda section: None)
    with pytest.raises(ValueError, match=sentence):
        check(load_config(Config, overrides=["model.path=m", "actor.engine.kind=megatron", *overrides]))


def test_the_extra_is_named_where_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"^actor.engine.kind is megatron, .* pip install 'strop\[megatron\]'"
    ):
        check_installed("actor.engine")


def test_settings_of_the_torch_engine_are_its_own() -> None:
    check_settings(EngineConfig(sequence_parallel=2, compile=True), OptimizerConfig(name="muon"))


LLAMA: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("config", "engine", "sentence"),
    [
        (transformers.GPT2Config(), {}, "carries the model types llama, .* the model is of gpt2"),
        (transformers.LlamaConfig(attention_bias=True), {}, "biases of its projections"),
        (transformers.Qwen3Config(hidden_act="gelu"), {}, "the activation gelu"),
        (
            transformers.LlamaConfig(**LLAMA),
            {"tensor_parallel": 8},
            "the 4 key-value heads .* a divisor of 4",
        ),
        (
            transformers.LlamaConfig(**LLAMA),
            {"pipeline_parallel": 2, "pipeline_chunks": 2},
            "pipeline_parallel times engine.pipeline_chunks is 4, but the 6 layers",
        ),
        (transformers.LlamaConfig(**LLAMA), {"expert_parallel": 2}, "the model has no experts: set it to 1"),
        (
            transformers.Qwen3MoeConfig(**LLAMA),
            {"tensor_parallel": 2},
            "set engine.expert_parallel to 2 or a multiple",
        ),
    ],
)
def test_models_that_it_does_not_have(config: Any, engine: dict[str, int], sentence: str) -> None:
    settings = EngineConfig(kind="megatron", megatron=MegatronConfig(), **engine)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=sentence):
        check_model(config, settings)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_the_checks_import_no_megatron_core() -> None:
    import subprocess
    import sys

    code = "import sys, strop.trainer.checks.parallel; sys.exit('megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
