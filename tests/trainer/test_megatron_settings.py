"""Settings and models that the Megatron engine does not have, refused before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import transformers

from strop.config import load_config
from strop.engines.config import EngineConfig, MegatronConfig, OptimizerConfig
from strop.engines.megatron import checks
from strop.engines.megatron.checks import check_installed, check_model, check_settings
from strop.engines.megatron.stages import stage_sizes
from strop.trainer.checks.devices import check_devices
from strop.trainer.checks.parallel import check
from strop.trainer.config import Config
from strop.trainer.start import start_run

TWO_STAGES = ("actor.engine.pipeline_parallel=2", "resources.ranks=2", "resources.runtime=ray")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.lora.rank=8"], "model.lora.rank is 8, which actor.engine.kind=megatron does not have"),
        (["model.use_liger=true"], "model.use_liger is true, which actor.engine.kind=megatron"),
        (["model.dtype=float16"], "model.dtype is float16, which actor.engine.kind=megatron"),
        (["model.dtype=float64"], "set actor.engine.megatron.distributed_optimizer=false"),
        (["actor.optim.name=muon"], "actor.optim.name is muon, which actor.engine.kind=megatron"),
        (["actor.engine.compile=true"], "actor.engine.compile is true, which actor.engine.kind=megatron"),
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
            "moe_enable_routing_replay to true, but experts are given with the rows",
        ),
        (
            ["actor.engine.megatron.transformer_config={moe_router_fusion: true}"],
            "actor.engine.megatron.transformer_config sets moe_router_fusion to true",
        ),
        (
            ["actor.engine.megatron.transformer_config={hidden_size: 64}"],
            "actor.engine.megatron.transformer_config sets hidden_size, which follows from the model: remove it",
        ),
        (
            ["actor.engine.megatron.transformer_config={moe_aux_loss_coeff: 0.0}"],
            "transformer_config sets moe_aux_loss_coeff, which follows from the model: remove it",
        ),
        (
            ["actor.engine.megatron.transformer_config={context_parallel_size: 1}"],
            "sets context_parallel_size, which follows from the other settings of the engine: remove it",
        ),
        (
            [
                "actor.engine.megatron.transformer_config={recompute_granularity: full}",
                "model.gradient_checkpointing=true",
            ],
            "sets recompute_granularity, which follows from model.gradient_checkpointing=true: remove it, or set that",
        ),
        (
            ["actor.engine.megatron.transformer_config={recompute_modules: [core_attn, moe]}"],
            r"recompute_modules=\['core_attn', 'moe'\], .* use model.gradient_checkpointing=true",
        ),
        (
            ["actor.engine.megatron.transformer_config={moe_layer_recompute: true}"],
            "moe_layer_recompute to true, but a router that is computed again on its own",
        ),
        (
            ["actor.engine.megatron.transformer_config={moe_expert_capacity_factor: 1.0}"],
            "moe_expert_capacity_factor to 1.0, but experts here take every token that chose them",
        ),
        (
            ["actor.engine.megatron.transformer_config={pipeline_model_parallel_layout: Et|tL}"],
            "pipeline_model_parallel_layout to Et|tL, but pipeline_layers of the engine says",
        ),
        (
            ["actor.engine.megatron.transformer_config={num_layers_in_first_pipeline_stage: 2}"],
            "num_layers_in_first_pipeline_stage=2, but actor.engine.pipeline_parallel is 1: leave it out",
        ),
        (
            ["actor.engine.megatron.transformer_config={num_layers_in_last_pipeline_stage: 0}", *TWO_STAGES],
            "num_layers_in_last_pipeline_stage to 0, but it needs a whole number of at least 1",
        ),
        (
            [
                "actor.engine.megatron.transformer_config={num_layers_in_last_pipeline_stage: 2}", *TWO_STAGES,
                "actor.engine.pipeline_layers=[3,2]",
            ],
            r"actor.engine.pipeline_layers is \[3, 2\], which both say how many layers stages have",
        ),
        (
            [
                "actor.engine.megatron.transformer_config.num_layers_in_last_pipeline_stage=2",
                "actor.engine.megatron.transformer_config.account_for_loss_in_pipeline_split=true", *TWO_STAGES,
            ],
            "either numbers of layers or what counts as one: leave one of them out",
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


def test_layers_are_computed_again_by_fields_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.trainer.checks.parallel.check_installed", lambda section: None)
    fields = "actor.engine.megatron.transformer_config={recompute_granularity: selective}"
    check(load_config(Config, overrides=["model.path=m", "actor.engine.kind=megatron", fields]))


needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


@needs_megatron
def test_fields_that_do_not_exist_are_refused_with_the_nearest_name() -> None:
    fields = {"moe_permute_fusoin": True}
    engine = EngineConfig(kind="megatron", megatron=MegatronConfig(transformer_config=fields))
    sentence = "actor.engine.megatron.transformer_config sets moe_permute_fusoin, .* mean moe_permute_fusion?"
    with pytest.raises(ValueError, match=sentence):
        check_settings(engine, section="actor.engine")


@pytest.mark.parametrize(
    ("command", "section", "overrides"),
    [
        ("train", "actor", ["actor.engine.kind=megatron"]),
        ("train", "critic", ["algorithm.adv_estimator=gae", "critic.engine.kind=megatron"]),
        ("sft", "sft", ["sft.engine.kind=megatron"]),
        ("dpo", "prefer", ["prefer.engine.kind=megatron"]),
    ],
)
def test_a_run_on_a_cpu_is_refused_before_its_folder_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, section: str, overrides: list[str]
) -> None:
    monkeypatch.setattr(checks, "DEVICES", ("cuda",))  # other modules of tests let a CPU pass
    monkeypatch.setattr("strop.trainer.checks.parallel.check_installed", lambda section: None)
    config = load_config(Config, overrides=["model.path=m", "resources.device=cpu", *overrides])
    sentence = f"^{section}.engine.kind is megatron, .* CUDA devices alone, and the device here is cpu: use"
    with pytest.raises(ValueError, match=sentence):
        start_run(tmp_path / "run", config, command=["strop", command])
    assert not (tmp_path / "run").exists()


def test_a_role_that_a_run_does_not_use_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEVICES", ("cuda",))
    overrides = [
        "model.path=m",
        "resources.device=cpu",
        "critic.engine.kind=megatron",
        "sft.engine.kind=megatron",
    ]
    check_devices(load_config(Config, overrides=overrides), "train")


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
        (
            transformers.LlamaConfig(**LLAMA),
            {"pipeline_parallel": 2, "pipeline_layers": (4, 1)},
            r"pipeline_layers is \[4, 1\], 5 layers in 2 stages, but the model has 6",
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


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def stages(ranks: int, chunks: int, fields: dict[str, Any]) -> EngineConfig:
    megatron = MegatronConfig(transformer_config=fields)
    return EngineConfig(kind="megatron", pipeline_parallel=ranks, pipeline_chunks=chunks, megatron=megatron)


@pytest.mark.parametrize(
    ("num_layers", "ranks", "chunks", "fields", "expected"),
    [
        (94, 8, 1, {FIRST: 11, LAST: 11}, (11, *[12] * 6, 11)),  # Qwen3-235B: 94 = 22 + 6 x 12
        (5, 2, 1, {FIRST: 2, LAST: None}, (2, 3)),
        (5, 2, 1, {LAST: 2}, (3, 2)),
        (6, 2, 2, {FIRST: 2, LAST: 4}, (1, 2, 1, 2)),
        (14, 3, 2, {FIRST: 2}, (1, 3, 3, 1, 3, 3)),
        (62, 8, 1, {EMBEDDING: True, LOSS: True}, (7, *[8] * 6, 7)),
        (7, 2, 2, {LOSS: True, EMBEDDING: False}, (2, 2, 2, 1)),
        (8, 2, 2, {EMBEDDING: False}, ()),
    ],
)
def test_layers_of_each_stage(
    num_layers: int, ranks: int, chunks: int, fields: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert stage_sizes(stages(ranks, chunks, fields), num_layers) == expected


@pytest.mark.parametrize(
    ("num_layers", "ranks", "chunks", "fields", "sentence"),
    [
        (94, 8, 1, {FIRST: 10, LAST: 11}, "leaves 73 of the 94 layers of the model to 6 other ranks"),
        (5, 2, 1, {FIRST: 2, LAST: 2}, "leaves 1 of the 5 layers of the model to 0 other ranks"),
        (5, 2, 1, {FIRST: 5}, "leaves 0 of the 5 layers of the model to 1 other ranks"),
        (6, 2, 2, {FIRST: 3}, "gives a rank 3 layers, but x.engine.pipeline_chunks is 2"),
        (7, 4, 1, {LOSS: True, EMBEDDING: True}, "layers of the model count as 9, .* is 4"),
        (2, 2, 2, {LOSS: True, EMBEDDING: True}, "leaves every stage a layer"),
    ],
)
def test_stages_that_a_model_has_no_layers_for(
    num_layers: int, ranks: int, chunks: int, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        stage_sizes(stages(ranks, chunks, fields), num_layers, section="x.engine")


def test_uneven_layers_are_no_error_of_the_model() -> None:
    shape = transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 5})
    check_model(shape, stages(2, 1, {FIRST: 2}))


@needs_megatron
def test_the_checks_import_no_megatron_core() -> None:
    import subprocess
    import sys

    code = "import sys, strop.trainer.checks.parallel; sys.exit('megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
