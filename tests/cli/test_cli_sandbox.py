"""`strop sandbox check`: what holds, what is missing, and the exit code."""

from __future__ import annotations

import json

import pytest

from strop.cli.main import main


def test_machine_that_isolates_is_told_so_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split("  ")[0]: line.split()[-1] for line in lines[:-1]} == dict.fromkeys(
        ("network", "files", "environment", "root", "work folder", "identity", "privileges", "filter", "namespaces",
         "processes", "first process", "allowances", "time", "processor", "memory", "shared memory", "socket buffers",
         "page tables", "program"), "ok",
    )  # fmt: skip
    assert lines[-1].startswith("sandbox: local ready, checked in ")


def test_missing_property_is_a_sentence_and_exit_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "check", "reward.sandbox.python=/no/python"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("start           MISSING: reward.sandbox.python is '/no/python'")
    assert "nothing that a model wrote is run here" in captured.err


def test_json_names_backend_and_properties(capsys: pytest.CaptureFixture[str]) -> None:
    url = "reward.sandbox.url=http://127.0.0.1:9"
    assert main(["sandbox", "check", "--json", "reward.sandbox.backend=sandbox_fusion", url]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["backend"], found["holds"]) == ("sandbox_fusion", {"start": False})
    assert "did not run a program" in found["missing"]["start"]


def test_impossible_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "check", "reward.sandbox.limits.memory_mib=1"]) == 2
    assert (
        "memory_mib is 1, but it needs a whole number of at least 32: an interpreter"
        in capsys.readouterr().err
    )
