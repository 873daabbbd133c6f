"""Settings of vLLM and SGLang in scripts of verl, TRL and OpenRLHF: those of rollout.vllm and rollout.sglang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.compat.migrate import (
    Migration,
    migrate_openrlhf,
    migrate_trl,
    migrate_verl,
    read_openrlhf,
    read_trl,
    read_verl,
)
from strop.config import config_of
from strop.trainer.config import Config

R = "actor_rollout_ref.rollout"
VLLM_OF_VERL = (
    f"{R}.name=vllm {R}.gpu_memory_utilization=0.8 {R}.enforce_eager=False {R}.max_num_batched_tokens=10240 "
    f"{R}.enable_chunked_prefill=True {R}.enable_prefix_caching=True {R}.max_num_seqs=512 {R}.max_model_len=4096 "
    f"{R}.dtype=bfloat16 +{R}.engine_kwargs.vllm.max_logprobs=5 +{R}.engine_kwargs.vllm.swap_space=8 "
    f"+{R}.engine_kwargs.vllm.seed=3 {R}.engine_kwargs.vllm.dtype=half {R}.engine_kwargs.vllm.quantization=null "
    f"{R}.engine_kwargs.sglang.attention_backend=fa3 {R}.tensor_model_parallel_size=2"
)
OF_VLLM = {
    "rollout.engine": "vllm",
    "rollout.vllm.gpu_memory_utilization": 0.8,
    "rollout.vllm.engine_args.enforce_eager": False,
    "rollout.vllm.engine_args.max_num_batched_tokens": 10240,
    "rollout.vllm.engine_args.enable_chunked_prefill": True,
    "rollout.vllm.engine_args.enable_prefix_caching": True,
    "rollout.vllm.engine_args.max_logprobs": 5,
    "rollout.vllm.engine_args.seed": 3,
    "rollout.max_running": 512,
}


def of_verl(folder: Path, text: str, engine: str | None = None) -> Migration:
    (folder / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {text}")
    return migrate_verl(read_verl([folder / "run.sh"], {}).found, engine=engine)


def of_engines(migration: Migration) -> dict[str, Any]:
    found = {key: value for row in migration.rows for key, value in row.outcome.ours.items()}
    return {
        key: value for key, value in found.items() if key.startswith("rollout.") and "samples_per" not in key
    }


def statuses(migration: Migration) -> dict[str, tuple[str, str]]:
    return {row.key: (row.outcome.status, row.outcome.note) for row in migration.rows}


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (folder / "python").touch()
    monkeypatch.setenv(f"STROP_{name.upper()}", str(folder / "python"))


def test_an_engine_that_is_installed_generates_with_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, "vllm")
    migration = of_verl(tmp_path, VLLM_OF_VERL)
    assert of_engines(migration) == OF_VLLM
    assert migration.open_rows == ()
    found = statuses(migration)
    assert found[f"{R}.engine_kwargs.vllm.swap_space"][0] == "not needed"
    assert found[f"{R}.engine_kwargs.vllm.dtype"] == ("not needed", "dtype follows from other settings here")
    assert found[f"{R}.engine_kwargs.vllm.quantization"] == ("not needed", "not set")
    assert found[f"{R}.engine_kwargs.sglang.attention_backend"][0] == "not needed"
    assert found[f"{R}.tensor_model_parallel_size"][0] == "not there"
    config = config_of(Config, migration.values)
    assert config.rollout.engine == "vllm"


def test_an_engine_that_is_given_beside_the_script_has_its_settings_anywhere(tmp_path: Path) -> None:
    assert of_engines(of_verl(tmp_path, VLLM_OF_VERL, engine="vllm")) == OF_VLLM


def test_an_engine_that_is_not_here_is_named_with_what_it_would_have(tmp_path: Path) -> None:
    migration = of_verl(tmp_path, VLLM_OF_VERL)
    assert of_engines(migration) == {"rollout.max_running": 512}
    found = statuses(migration)
    assert found[f"{R}.name"][0] == "not there"
    assert "strop engine install vllm, then rollout.engine=vllm behind FILE" in found[f"{R}.name"][1]
    assert found[f"{R}.gpu_memory_utilization"] == (
        "not there",
        "strop's own engine has no such setting; with rollout.engine=vllm it is rollout.vllm.gpu_memory_utilization",
    )
    assert found[f"{R}.engine_kwargs.vllm.max_logprobs"][1].endswith("rollout.vllm.engine_args.max_logprobs")


def test_an_installed_engine_is_left_alone_where_strops_own_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, "vllm")
    migration = of_verl(tmp_path, VLLM_OF_VERL, engine="native")
    assert of_engines(migration) == {"rollout.max_running": 512}


def test_settings_of_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, "sglang")
    migration = of_verl(
        tmp_path,
        f"{R}.name=sglang {R}.gpu_memory_utilization=0.6 {R}.enforce_eager=True {R}.enable_prefix_caching=False "
        f"{R}.enable_chunked_prefill=True {R}.engine_kwargs.sglang.attention_backend=fa3 "
        f"+{R}.engine_kwargs.sglang.tp_size=4",
    )
    assert of_engines(migration) == {
        "rollout.engine": "sglang",
        "rollout.sglang.mem_fraction_static": 0.6,
        "rollout.sglang.server_args.disable_cuda_graph": True,
        "rollout.sglang.server_args.disable_radix_cache": True,
        "rollout.sglang.server_args.attention_backend": "fa3",
    }
    found = statuses(migration)
    assert found[f"{R}.enable_chunked_prefill"] == ("not there", "rollout.engine=sglang has no such setting")
    assert found[f"{R}.engine_kwargs.sglang.tp_size"][0] == "not needed"
    config_of(Config, migration.values)


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_the_engine_of_trl(engine: str | None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from trl import GRPOConfig, GRPOTrainer\n"
        "args = GRPOConfig(use_vllm=True, vllm_mode='colocate', vllm_gpu_memory_utilization=0.3, "
        "vllm_enable_prefix_caching=False, vllm_model_impl='transformers', vllm_max_model_length=4096)\n"
        "GRPOTrainer(model='m', args=args)\n"
    )
    script = read_trl(tmp_path / "train.py", {}, rewards=tmp_path / "rewards.py")
    migration = migrate_trl(script.found, script.kind, engine=engine)
    expected = {
        "rollout.engine": "vllm",
        "rollout.vllm.gpu_memory_utilization": 0.3,
        "rollout.vllm.engine_args.enable_prefix_caching": False,
        "rollout.vllm.engine_args.model_impl": "transformers",
    }
    assert of_engines(migration) == (expected if engine else {})
    assert statuses(migration)["GRPOConfig.use_vllm"][0] == ("translated" if engine else "not there")


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_the_engine_of_openrlhf(engine: str | None, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d.jsonl --remote_rm_url r.py "
        "--vllm_num_engines 4 --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.5 --enforce_eager "
        "--vllm_enable_sleep --enable_prefix_caching --colocate_all_models"
    )
    migration = migrate_openrlhf(read_openrlhf(tmp_path / "run.sh", {}), engine=engine)
    expected = {
        "rollout.engine": "vllm",
        "rollout.vllm.gpu_memory_utilization": 0.5,
        "rollout.vllm.engine_args.enforce_eager": True,
        "rollout.vllm.engine_args.enable_prefix_caching": True,
    }
    assert of_engines(migration) == (expected if engine else {})
    found = statuses(migration)
    assert found["vllm_num_engines"][0] == ("translated" if engine else "not there")
    assert found["vllm_enable_sleep"][0] == "not needed"
    assert found["vllm_tensor_parallel_size"][0] == "not there"
