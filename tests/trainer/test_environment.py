"""`resources.env`: variables of the environment of every process of a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import Project

from strop.config import ConfigError, load_config
from strop.controller import Dispatch, Worker, register, role
from strop.observability.trackers.setup import read_metrics
from strop.rollout.sglang.process import SglangProcess
from strop.rollout.vllm.process import ServerProcess
from strop.trainer.config import Config
from strop.trainer.environment import environment_of, variables_of
from strop.trainer.ray_runtime import make_runtime
from strop.trainer.sections import ResourcesConfig
from strop.trainer.start import start_run
from strop.trainer.train import train
from strop.trainer.untrusted_runs.named import code_references

REWARD = """\
import os

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(os.environ["OF_THE_RUN"]) + float(os.environ["PASSED_ON"])
"""


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("RANK: 0", "names RANK: it is another one in each process"),
        ("CUDA_VISIBLE_DEVICES: '0'", "to use some devices alone, export it before the command"),
        ("OMP_NUM_THREADS: 4", "set resources.num_threads"),
        ("PYTHONPATH: src", "export it before the command"),
        ("VLLM_HOST_IP: '10.0.0.1'", "training with vLLM depends on the value"),
        ("STROP_VLLM: envs/vllm", "variables of strop itself are exported before the command"),
        ("A-B: x", "'A-B', which is no name of a variable"),
        ("HF_TOKEN: hf_AbCdEfGhIjKlMnOpQrStUv", "set resources.env.HF_TOKEN=null, which passes it on"),
        ("NCCL_DEBUG: true", "resources.env.NCCL_DEBUG is true"),
    ],
)
def test_a_variable_that_cannot_be_given_is_refused(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(Config, overrides=[f"resources.env={{{setting}}}"])
    assert sentence in str(refused.value)
    assert "hf_Ab" not in str(refused.value)


def test_numbers_become_text_and_null_passes_a_variable_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSED_ON", "here")
    monkeypatch.delenv("NOT_HERE", raising=False)
    resources = ResourcesConfig(env={"NCCL_IB_DISABLE": 1, "A": "b", "SHARE": 0.5, "PASSED_ON": None})
    assert variables_of(resources) == {"NCCL_IB_DISABLE": "1", "A": "b", "SHARE": "0.5", "PASSED_ON": "here"}
    with pytest.raises(ValueError, match="passes on the variable NOT_HERE, but it is not set here"):
        variables_of(ResourcesConfig(env={"NOT_HERE": None}))


def test_settings_of_somebody_else_that_give_variables_are_named_before_they_are_used() -> None:
    config = load_config(Config, overrides=["resources.env={LD_PRELOAD: /tmp/x.so}"])
    assert ("resources.env", "['LD_PRELOAD'] (variables of the environment)") in [
        (one.key, one.value) for one in code_references(config)
    ]


def test_the_variables_end_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.delenv("ADDED", raising=False)
    show = [sys.executable, "-c", "import os; print(os.environ['CHANGED'], os.environ['ADDED'])"]
    with environment_of(ResourcesConfig(env={"CHANGED": "meanwhile", "ADDED": 1})):
        assert subprocess.check_output(show, text=True) == "meanwhile 1\n"
    assert os.environ["CHANGED"] == "before"
    assert "ADDED" not in os.environ


@pytest.mark.parametrize("runtime", ["inline", pytest.param("ray", marks=pytest.mark.dist)])
def test_reward_functions_have_the_variables(
    runtime: str, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSED_ON", "0.5")
    monkeypatch.delenv("OF_THE_RUN", raising=False)
    (tmp_path / "reward.py").write_text(REWARD)
    config = project.config(
        f"reward.path={tmp_path}/reward.py",
        "resources.env={OF_THE_RUN: 0.25, PASSED_ON: null}",
        f"resources.runtime={runtime}",
        "resources.cpus_per_rank=0.25",
        "trainer.max_steps=1",
    )
    start = start_run(tmp_path / "run", config, command=["strop", "train"])
    with start.run as run:
        train(config, run, say=lambda line: None)
    (step,) = [one for one in read_metrics(tmp_path / "run" / "metrics.jsonl") if one["step"] == 1]
    assert step["critic/score/mean"] == 0.75
    assert "OF_THE_RUN" not in os.environ


@pytest.mark.dist
def test_workers_on_ray_are_started_with_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OF_THE_RUN", raising=False)
    resources = ResourcesConfig(
        runtime="ray", ranks=2, cpus_per_rank=0.25, num_threads=1, env={"OF_THE_RUN": "x y"}, device="cpu"
    )
    with make_runtime(resources, log_dir=None) as runtime:
        group = runtime.groups({"teller": role(Teller)})["teller"]
        assert group.call.variables() == [["x y", "1", str(rank)] for rank in range(2)]


class Teller(Worker):
    """Says what is in its environment."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variables(self) -> list[str | None]:
        return [os.environ.get(name) for name in ("OF_THE_RUN", "OMP_NUM_THREADS", "RANK")]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_servers_of_engines_have_the_variables(kind: str, tmp_path: Path) -> None:
    python, told = tmp_path / "python", tmp_path / "told"
    python.write_text(f"#!/bin/sh\nenv > {told}.part && mv {told}.part {told}\nexec sleep 60\n")
    python.chmod(0o700)
    server: ServerProcess | SglangProcess
    with environment_of(ResourcesConfig(env={"VLLM_ATTENTION_BACKEND": "XFORMERS", "NCCL_IB_DISABLE": 1})):
        if kind == "vllm":
            server = ServerProcess(python, log=tmp_path / "log", env={"HF_HUB_OFFLINE": "1"})
        else:
            server = SglangProcess(python, {}, log=tmp_path / "log", env={"HF_HUB_OFFLINE": "1"})
    try:
        until = time.monotonic() + 60
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.02)
        lines = told.read_text().splitlines()
    finally:
        server.close()
    assert {"VLLM_ATTENTION_BACKEND=XFORMERS", "NCCL_IB_DISABLE=1", "HF_HUB_OFFLINE=1"} <= set(lines)
