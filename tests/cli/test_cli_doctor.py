"""`strop doctor`: what it finds on made-up machines, and on this one."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_calls import cli

from strop.cli.commands import doctor
from strop.cli.commands.doctor import CheckResult
from strop.cli.doctor import engines
from strop.cli.doctor.survey import MachineFacts, OpenPort
from strop.cli.versions import versions_in
from strop.config import load_config
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import TokenOutput
from strop.trainer.config import Config
from strop.trainer.sections import ResourcesConfig

GIB = 2**30


def machine(address: str = "10.0.0.1", **changes: object) -> MachineFacts:
    facts = {
        "address": address,
        "python": "3.11.7",
        "versions": {"strop": "1.0", "ray": "2.60.0", "torch": "2.13.0", "peft": ""},
        "device": "cuda",
        "num_devices": 8,
        "memory_bytes": 512 * GIB,
        "shared_memory_free_bytes": 64 * GIB,
        "ports": (OpenPort(program="raylet", host="10.0.0.1", port=7000),),
        "marker": "token",
        "clock": time.time(),
    }
    return MachineFacts(**(facts | changes))  # type: ignore[arg-type]


def test_machines_that_are_alike_have_one_version_of_everything() -> None:
    findings = list(doctor._versions([machine(), machine("10.0.0.2")]))
    assert all(finding.is_fine for finding in findings)
    assert [finding.text for finding in findings] == [
        "python 3.11.7", "strop 1.0", "ray 2.60.0", "torch 2.13.0"
    ]  # fmt: skip


def test_another_version_on_one_machine_is_named_with_it() -> None:
    other = machine("10.0.0.2", versions={"strop": "1.0", "ray": "2.55.0", "torch": "", "peft": ""})
    wrong = [finding.text for finding in doctor._versions([machine(), other]) if not finding.is_fine]
    assert wrong == [
        "2.55.0 on 10.0.0.2, 2.60.0 on 10.0.0.1; install one version of ray everywhere",
        "nothing on 10.0.0.2, 2.13.0 on 10.0.0.1; install one version of torch everywhere",
    ]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            doctor._devices(
                [(None, machine()), (None, machine("10.0.0.2", num_devices=7))], ResourcesConfig()
            ),  # type: ignore[list-item]
            "7 cuda on 10.0.0.2, 8 cuda on 10.0.0.1; ranks are spread evenly",
        ),
        (
            doctor._devices([(None, machine(device="cpu", num_devices=1))], ResourcesConfig(device="cuda")),  # type: ignore[list-item]
            "1 cpu each; no cuda on 10.0.0.1: check its driver",
        ),
        (
            doctor._ports([machine(ports=(OpenPort(program="gcs_server", host="0.0.0.0", port=6379),))]),
            "1 of 1 listen on every address (gcs_server on 0.0.0.0:6379 of 10.0.0.1)",
        ),
        (
            doctor._paths([machine(), machine("10.0.0.2", marker="")], "token", Path("/runs")),
            "/runs is not the same folder on 10.0.0.2",
        ),
        (doctor._clocks([machine(clock=time.time() + 60)], time.time(), 1.0), "10.0.0.1 (+60 s) differ"),
        (doctor._clocks([machine(clock=time.time() - 60)], time.time(), 1.0), "10.0.0.1 (-60 s) differ"),
        (doctor._shared_memory([machine(shared_memory_free_bytes=GIB // 2)]), "enlarge /dev/shm on 10.0.0.1"),
    ],
)
def test_what_is_wrong_is_said_with_the_machine_and_what_to_do(found: CheckResult, sentence: str) -> None:
    assert not found.is_fine
    assert sentence in found.text


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "192.168.0.7", "::1", "fe80::1%eth0"])
def test_loopback_and_private_addresses_are_no_public_ports(host: str) -> None:
    assert not OpenPort(program="raylet", host=host, port=1).is_public


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "8.8.8.8"])
def test_other_addresses_are(host: str) -> None:
    assert OpenPort(program="raylet", host=host, port=1).is_public


def test_more_ranks_than_cores_are_counted_before_the_run() -> None:
    node = SimpleNamespace(total={"CPU": 64.0})
    settings = ResourcesConfig(runtime="ray", ranks=60, apart={"rollout": 8})
    (finding,) = doctor._capacity([(node, machine())], settings)  # type: ignore[list-item]
    assert not finding.is_fine
    assert finding.text.startswith("68 ranks on 1 nodes need 68 CPU cores; there are 64 on 1 nodes")


@pytest.mark.slow
def test_this_machine_is_looked_at_for_real(tmp_path: Path) -> None:
    result = cli("doctor", "resources.runtime=ray", "--path", tmp_path, "--json")
    findings = {(one["check"], one["is_fine"]) for one in json.loads(result.out)["findings"]}
    assert ("machines", True) in findings
    assert ("shared path", True) in findings
    assert ("ports", True) in findings, result.out
    assert list(tmp_path.iterdir()) == [], "the marker is gone"


def test_engines_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_VLLM", "/nowhere")
    monkeypatch.delenv("STROP_SGLANG", raising=False)
    tried = cli("doctor", "--engines")
    lines = tried.out.splitlines()
    assert (tried.code, [line[2:6] for line in lines[1:7]]) == (0, ["ok  "] * 6)
    assert lines[7].startswith("sglang: not tried: rollout.engine=sglang needs SGLang")
    assert lines[8].startswith("vllm: not tried: the variable STROP_VLLM names '/nowhere'")


class OtherLogProbs(NativeEngine):
    async def generate(self, *arguments: Any, **options: Any) -> TokenOutput:
        output = await super().generate(*arguments, **options)
        return dataclasses.replace(output, log_probs=tuple(p - 0.1 for p in output.log_probs))


class ForgetsVersions(NativeEngine):
    async def generate(self, *arguments: Any, **options: Any) -> TokenOutput:
        output = await super().generate(*arguments, **options)
        return dataclasses.replace(output, versions=(0,) * len(output.token_ids))


class IgnoresAbort(NativeEngine):
    async def abort(self, request_ids: object = None) -> None: ...


class DoesNotStart(NativeEngine):
    async def health(self) -> Mapping[str, float]:
        raise RuntimeError("no kernel for this device")


class NeverWakes(NativeEngine):
    async def wake_up(self) -> None:
        raise RuntimeError("the memory is gone")


class NeverRepeats(NativeEngine):
    async def generate(self, request_id: str, prompt_ids: Any, sampling: Any, **options: Any) -> TokenOutput:
        self.asked = getattr(self, "asked", 0) + 1
        prompt = [self.asked, *prompt_ids]
        return await super().generate(request_id, prompt, sampling, **options)


@pytest.mark.parametrize(
    ("engine", "check", "text"),
    [
        (DoesNotStart, "starts and generates a token", "RuntimeError: no kernel for this device. Install"),
        (NeverRepeats, "greedy decoding repeats itself", "the same prompt gave ("),
        (OtherLogProbs, "log-probs are those of the trainer's model", "log-probs differ by 0.1 on average"),
        (ForgetsVersions, "new weights are used", "version 1 was set; tokens carry [0]"),
        (
            NeverWakes,
            "sleeps and wakes up",
            "RuntimeError: the memory is gone. Install the versions of torch",
        ),
        (IgnoresAbort, "an aborted request returns what it has", "ends by 'length' with 2048"),
    ],
)
def test_what_an_engine_cannot_do_is_said(
    monkeypatch: pytest.MonkeyPatch, engine: type[NativeEngine], check: str, text: str
) -> None:
    monkeypatch.setattr(engines, "NativeEngine", engine)
    monkeypatch.setattr(engines, "OWN_PROCESSES", ())
    tried = cli("doctor", "--engines", "--json")
    record = json.loads(tried.out)
    assert record["versions"]["native"].startswith(f"torch {torch.__version__}, transformers ")
    failed = {one["check"]: one["text"] for one in record["engines"]["native"] if one["outcome"] == "failed"}
    assert tried.code == 1
    assert text in failed[check]


def test_versions_of_another_environment_are_read_without_importing_them(tmp_path: Path) -> None:
    known = versions_in(Path(sys.executable), "vllm")
    assert f"torch {version('torch')}, transformers {version('transformers')}" in known
    assert versions_in(tmp_path / "nothing", "vllm") == ""
    settings = ["rollout.engine=vllm", f"rollout.vllm.python='{sys.executable}'"]
    told = doctor._rollout(load_config(Config, overrides=settings))
    assert told.text.endswith(f"; {known} in {sys.executable}")


def test_engines_are_tried_by_themselves() -> None:
    refused = cli("doctor", "--engines", "--path", ".")
    assert refused.code == 2
    assert "--path has no place beside it" in refused.err
