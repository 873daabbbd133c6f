"""What is refused before vLLM is started, and what an environment without it says."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from strop.config import ConfigError
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.model import load_model, weights_of_folder
from strop.engines.weights import weights_metadata
from strop.rollout.config import RolloutConfig
from strop.rollout.engine_group import check_engine
from strop.rollout.vllm.config import VllmConfig
from strop.rollout.vllm.engine import start_vllm
from strop.rollout.vllm.environment import VARIABLE, vllm_python
from strop.rollout.vllm.process import VllmDied
from strop.rollout.vllm.routed import routed_experts
from strop.rollout.vllm.settings import Settings
from strop.rollout.weight_sync.probe import check_probe, probe_tokens
from strop.rollout.weight_sync.types import Probe, SyncCorrupted
from strop.trainer.loading import load
from strop.trainer.untrusted_runs.named import code_references


def settings(model: Path, log: Path) -> Settings:
    return Settings(
        model=str(model), dtype="float32", device="cpu", max_tokens=64, max_running=8, num_threads=1,
        shares_device=True, log=log,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "rollout.sglang.tensor_parallel=2",
            "rollout.engine=native does not read it: set rollout.engine=sglang",
        ),
        ("rollout.vllm.tensor_parallel=2", "rollout.engine=native does not read it"),
        (
            "rollout.vllm.engine_args={max_model_len: 5}",
            "names max_model_len, which follows from other settings",
        ),
        (
            "rollout.vllm.engine_args={enable_return_routed_experts: true}",
            "names enable_return_routed_experts, which follows from other settings",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(overrides=["model.path=somewhere", override])


@pytest.mark.parametrize("cut", ["rollout.top_p=0.9", "rollout.top_k=20"])
def test_drafts_of_a_cut_distribution_are_refused(cut: str) -> None:
    """vLLM's rejection sampler gives log-probs behind top-k and top-p, whatever its sampler gives."""
    drafts = [
        "model.path=somewhere",
        "rollout.engine=vllm",
        "rollout.vllm.engine_args={speculative_config: {method: ngram, num_speculative_tokens: 2}}",
    ]
    with pytest.raises(ConfigError, match="has speculative_config, with which vLLM gives log-probs of the d"):
        load(overrides=[*drafts, cut])
    load(overrides=drafts)
    load(overrides=[*drafts[:2], "rollout.vllm.engine_args={speculative_config: null}", cut])


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    settings = ["model.path=somewhere", "rollout.engine=vllm"]
    with pytest.raises(ConfigError, match=r"rollout.temperature is 0.005, and vLLM samples at 0.01 whatever"):
        load(overrides=[*settings, "rollout.temperature=0.005"])
    load(overrides=[*settings, "rollout.temperature=0.01"])
    load(overrides=["model.path=somewhere", "rollout.temperature=0.005"])


def test_a_missing_environment_names_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="`strop engine install vllm`"):
        check_engine(ModelConfig(path="model"), RolloutConfig(engine="vllm"))
    python = tmp_path / "strop" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert vllm_python("") == python
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert vllm_python("") == Path(sys.executable)
    with pytest.raises(ValueError, match=r"rollout.vllm.python names 'elsewhere'"):
        vllm_python("elsewhere")


def test_float64_is_refused_by_name() -> None:
    rollout = RolloutConfig(engine="vllm", vllm=VllmConfig(python=sys.executable))
    with pytest.raises(ValueError, match="model.dtype=float64"):
        check_engine(ModelConfig(path="model", dtype="float64"), rollout)


def test_a_python_without_vllm_is_named(tiny_model: Path, tmp_path: Path) -> None:
    config = VllmConfig(python=sys.executable, start_timeout_s=60)
    held = weights_of_folder(ModelConfig(path=str(tiny_model)))
    with pytest.raises(RuntimeError, match="No module named 'vllm'"):
        asyncio.run(start_vllm(config, settings(tiny_model, tmp_path / "log"), held, version=0))


def test_a_process_that_ends_at_once_says_what_its_log_says(tiny_model: Path, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'OSError: no such device' >&2\nexit 3\n")
    program.chmod(0o755)
    held = weights_of_folder(ModelConfig(path=str(tiny_model)))
    config = VllmConfig(python=str(program), start_timeout_s=60)
    with pytest.raises(VllmDied, match=r"exit code 3\): OSError: no such device; its log is .*log"):
        asyncio.run(start_vllm(config, settings(tiny_model, tmp_path / "log"), held, version=0))


def test_weights_of_a_folder_are_told_before_anything_else_is_imported(tiny_model: Path) -> None:
    code = (
        "from strop.engines.config import ModelConfig; from strop.engines.model import weights_of_folder; "
        f"print(len(weights_of_folder(ModelConfig(path={str(tiny_model)!r}))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(weights_of_folder(ModelConfig(path=str(tiny_model))))


def test_weights_of_a_folder_are_those_of_the_loaded_model(tiny_model: Path) -> None:
    model = ModelConfig(path=str(tiny_model))
    found = weights_of_folder(model)
    assert found == weights_metadata(load_model(model, device="cpu").module)
    assert found.by_name["lm_head.weight"].name == "model.embed_tokens.weight"
    adapted = dataclasses.replace(model, lora=LoraConfig(rank=2))
    assert weights_of_folder(adapted) == weights_metadata(load_model(adapted, device="cpu").module)


def test_a_probe_allows_rounding_alone() -> None:
    # Differences 0.02 and 0.004: 0.012 on average.
    probe = Probe(token_ids=(1, 2, 3), log_probs=(-1.0, -2.0))
    found = [-1.02, -2.004]
    assert check_probe(probe, found, version=1, dtype="bfloat16") == pytest.approx(0.012)
    with pytest.raises(SyncCorrupted, match=r"sync 1 corrupted: on a probe of 2 tokens .* 0\.012 "):
        check_probe(probe, found, version=1, dtype="float32")
    with pytest.raises(SyncCorrupted):
        check_probe(probe, [float("nan"), -2.0], version=1, dtype="bfloat16")


def test_probe_tokens_are_of_the_vocabulary() -> None:
    for vocab in (5, 103, 150_000):
        ids = torch.tensor(probe_tokens(vocab))
        assert 0 <= ids.min() <= ids.max() < vocab


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ((), "rollout: native, time-shared with the actor, with the actor's own weights"),
        (("rollout.engine=vllm",), "rollout: vllm, time-shared with the actor, on its devices"),
        (
            ("rollout.engine=vllm", "resources.runtime=ray", "resources.apart={rollout: 2}"),
            "rollout: vllm, apart, in 2 processes of its own",
        ),
    ],
)
def test_the_first_lines_say_where_is_generated(overrides: tuple[str, ...], line: str) -> None:
    assert load(overrides=["model.path=somewhere", *overrides]).placement().startswith(line)


def test_what_a_received_run_would_start_is_named() -> None:
    config = load(
        overrides=[
            "model.path=somewhere", "rollout.engine=vllm", "rollout.vllm.python=/bin/false",
            "rollout.vllm.engine_args={scheduler_cls: mine}",
        ]
    )  # fmt: skip
    assert {"rollout.vllm.python", "rollout.vllm.engine_args"} <= {
        named.key for named in code_references(config)
    }


def test_an_engine_spans_tensor_parallel_times_pipeline_parallel_devices(tmp_path: Path) -> None:
    config = VllmConfig(tensor_parallel=4, pipeline_parallel=2)
    assert config.num_devices == 8
    arguments = settings(tmp_path, tmp_path / "log").engine_args(config)
    assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (4, 2)
    with pytest.raises(ValueError, match="names pipeline_parallel_size, which follows from other settings"):
        VllmConfig(engine_args={"pipeline_parallel_size": 2})


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["rollout.engine=sglang"], "rollout.engine=sglang records no routing: use native or vllm"),
        (
            ["rollout.engine=vllm", "rollout.vllm.pipeline_parallel=2"],
            "with rollout.vllm.pipeline_parallel=2",
        ),
        (
            ["rollout.engine=vllm", "rollout.vllm.engine_args={async_scheduling: true}"],
            "does not go with async_scheduling in rollout.vllm.engine_args: remove it",
        ),
    ],
)
def test_settings_with_which_the_routing_is_not_recorded_are_refused(
    overrides: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(overrides=["model.path=somewhere", "rollout.router_replay=true", *overrides])


def test_an_engine_records_the_routing_step_by_step(tmp_path: Path) -> None:
    plain = settings(tmp_path, tmp_path / "log")
    recording = dataclasses.replace(plain, records_routing=True)
    added = dict(recording.engine_args(VllmConfig()).items() - plain.engine_args(VllmConfig()).items())
    assert added == {"enable_return_routed_experts": True, "async_scheduling": False}
    assert dict(recording.env().items() - plain.env().items()) == {"STROP_ROUTING": "1"}


def test_an_engine_has_no_segments_that_grow_unless_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for own, given in (("expandable_segments:True", "expandable_segments:False"), ("backend:native", None)):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", own)
        assert settings(tmp_path, tmp_path / "log").env().get("PYTORCH_CUDA_ALLOC_CONF") == given


@pytest.mark.parametrize(("dtype", "large"), [("uint8", 255), ("uint16", 300)])
def test_experts_of_a_message_are_two_bytes_each_token_by_token(dtype: str, large: int) -> None:
    # Two tokens, two layers, three experts of each.
    numbers = torch.tensor([[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, large]]], dtype=getattr(torch, dtype))
    data = base64.b64encode(numbers.numpy().tobytes()).decode()
    message = {"shape": [2, 2, 3], "dtype": dtype, "data": data}
    found = routed_experts(message, num_read=2, request_id="r")
    assert (found.num_layers, found.num_chosen) == (2, 3)
    assert found.tokens == (
        bytes([0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0]),
        bytes([6, 0, 7, 0, 8, 0, 9, 0, 10, 0, large % 256, large // 256]),
    )
    with pytest.raises(RuntimeError, match="experts of 2 tokens of request r, but its model has read 3"):
        routed_experts(message, num_read=3, request_id="r")
    with pytest.raises(RuntimeError, match="experts of 0 tokens"):
        routed_experts(None, num_read=3, request_id="r")
