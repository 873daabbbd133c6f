"""Settings that cannot apply are refused with a sentence; those of a run reach the reward workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from strop.rewards import RewardConfig
from strop.sandbox import Limits, LocalSandbox, Program, SandboxConfig, make_sandbox
from strop.sandbox.factory import SharedSandbox, config_from_data
from strop.sandbox.fusion import FusionSandbox


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"wall_s": 0.0}, "reward.sandbox.limits.wall_s is 0.0, but it needs a finite number above 0"),
        ({"cpu_s": float("nan")}, "cpu_s is nan"),
        ({"memory_mib": 8}, "of at least 32: an interpreter needs that"),
        ({"max_processes": 0}, "max_processes is 0, but it needs a whole number of at least 1"),
        ({"max_open_files": 4}, "of at least 16: an interpreter needs as many"),
        ({"file_mib": 0}, "file_mib is 0"),
        ({"disk_mib": 0}, "disk_mib is 0"),
        ({"output_kib": 0}, "output_kib is 0"),
    ],
)
def test_impossible_limits_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Limits(**settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"backend": "sandbox_fusion"}, "give the address of the server"),
        ({"url": "http://a"}, "backend is local, which asks no server"),
        ({"backend": "e2b", "python": "/usr/bin/python3"}, "only a local sandbox has it"),
        ({"backend": "sandbox_fusion", "url": "http://a", "isolation": "kernel"}, "sandbox.isolation is set"),
        (
            {"max_concurrent": 0},
            "reward.sandbox.max_concurrent is 0, but it needs a whole number of at least 1",
        ),
        ({"num_warm": 9}, "use a number from 0 to that"),
        ({"queue_s": 0.0}, "queue_s is 0.0"),
        ({"read_only_paths": ("x",)}, "by their full path, not the root"),
        ({"read_only_paths": ("/",)}, "by their full path, not the root"),
    ],
)
def test_settings_that_cannot_apply_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SandboxConfig(**settings)


def test_program_is_code_or_a_command() -> None:
    with pytest.raises(ValueError, match="either code or a command"):
        Program()
    with pytest.raises(ValueError, match="either code or a command"):
        Program(code="1", command=("true",))


def test_backend_follows_the_configuration() -> None:
    assert isinstance(make_sandbox(SandboxConfig()), LocalSandbox)
    assert isinstance(
        make_sandbox(SandboxConfig(backend="sandbox_fusion", url="http://127.0.0.1:1")), FusionSandbox
    )


def test_configuration_passes_to_another_process_as_plain_data() -> None:
    config = SandboxConfig(read_only_paths=("/opt",), num_warm=0, limits=Limits(memory_mib=99))
    assert config_from_data(asdict(config)) == config
    assert RewardConfig(sandbox=config).sandbox is config


def test_shared_sandbox_takes_a_changed_configuration() -> None:
    shared = SharedSandbox()
    shared.configure(SandboxConfig(max_concurrent=1))
    first = shared.get()
    assert shared.get() is first
    shared.configure(SandboxConfig(max_concurrent=1, limits=Limits(output_kib=1)))
    second = shared.get()
    assert second is not first
    assert second.run_blocking(Program(code="print('x' * 5000)")).outcome == "output"
    shared.close()
