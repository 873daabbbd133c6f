"""`strop plan`: its answer as JSON and as text, its exit code, and bad input."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from cli_calls import cli
from transformers import BertConfig, Qwen3Config

from strop.trainer.plan.baseline import Baseline


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration whose model is a config.json."""
    Qwen3Config(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=151_936, tie_word_embeddings=True,
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model: {{path: '{tmp_path / 'model'}', dtype: bfloat16}}\n"
        "data: {train_files: [rows.jsonl], prompts_per_step: 8}\nreward: {path: reward.py}\n"
    )
    return file


def test_a_plan_as_json_says_whether_it_fits_and_what_would(config: Path) -> None:
    result = cli("plan", str(config), "--device", "h100", "--json")
    assert result.code == 0
    record = result.record
    assert record["fits"] is True
    assert record["suggestion"] == ""
    assert record["peak_bytes"] == max(phase["device_bytes"] for phase in record["phases"])
    assert record["step_seconds"] == pytest.approx(sum(record["stages"].values()))
    small = cli("plan", str(config), "--device", "h100", "--memory-gib", "24", "--json")
    assert small.code == 1
    assert small.record["fits"] is False
    fits = cli(
        "plan",
        str(config),
        "--device",
        "h100",
        "--memory-gib",
        "24",
        *shlex.split(small.record["suggestion"]),
        "--json",
    )
    assert fits.code == 0
    assert fits.record["step_seconds"] == pytest.approx(small.record["suggestion_step_seconds"])


def test_a_plan_as_text_names_the_phase_with_most(config: Path) -> None:
    result = cli("plan", str(config), "--device", "h100", "--memory-gib", "24")
    assert result.code == 1
    assert "it does NOT fit" in result.out
    assert "smallest change: actor.engine.max_tokens_per_device=" in result.out
    assert "actor: update:" in result.out
    assert "time of a step with it: " in result.out


def test_a_long_step_has_its_seconds_in_full(config: Path) -> None:
    longer = ("data.prompts_per_step=20000", "--memory-gib", "70")
    result = cli("plan", str(config), "--device", "h100", *longer)
    assert re.search(r"time of a step: \d,\d{3} s \(gen \d,\d{3}, update_actor \d", result.out)
    assert "e+0" not in result.out.partition("time of a step")[2].partition("\n")[0]


@pytest.mark.slow
def test_a_suggested_placement_is_a_run_that_costs_the_same(config: Path) -> None:
    record = cli("plan", "--config", str(config), "--device", "h100", "--devices", "4", "--json").record
    fastest = record["placements"]["fastest"]
    again = cli("plan", str(config), *shlex.split(record["suggestion"]), "--device", "h100", "--json").record
    assert again["peak_bytes"] == fastest["peak_bytes"]
    assert again["step_seconds"] == pytest.approx(fastest["step_seconds"])
    assert again["device_hours_per_step"] == pytest.approx(fastest["device_hours_per_step"])


def test_where_no_placement_fits_a_change_that_does_is_suggested(config: Path) -> None:
    device = ("--device", "h100", "--memory-gib", "8", "--json")
    found = cli("plan", str(config), *device, "--devices", "1").record
    assert found["placements"]["fitting"] == 0
    assert found["suggestion"]
    again = cli("plan", str(config), *shlex.split(found["suggestion"]), *device)
    assert again.code == 0


def test_a_plan_for_a_cpu_offers_what_a_cpu_has(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.trainer.plan.plan.baseline_of", lambda _: Baseline(num_bytes=500 << 20))
    # Its first layers are carried out, so that it is small; a process without a model takes more than that.
    Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, vocab_size=512,
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    result = cli("plan", str(config), "--device", "cpu", "--memory-gib", "0.1")
    assert result.code == 1
    assert "no change of budget, running sequences, checkpointing, adapters makes it fit" in result.out
    assert "each process with a model has an equal part" in result.out
    assert re.match(r"actor: 0\.\d+ M parameters, (0\.\d+ M) trained, 1 rank\n", result.out)
    assert "  load: 0.00\n" in result.out  # without parts that round to nothing
    assert (
        "processes on a CPU share its cores"
        in cli("plan", str(config), "--device", "cpu", "--devices", "2").sentence
    )


def test_bad_input_is_a_sentence(config: Path, tmp_path: Path) -> None:
    assert (
        "--memory-gib is -1; give a finite number above 0"
        in cli("plan", str(config), "--memory-gib", "-1").sentence
    )
    for word in ("nan", "inf"):
        assert f"--memory-gib is {word}; give" in cli("plan", str(config), "--memory-gib", word).sentence
    assert "is no file" in cli("plan", str(tmp_path / "no.yaml")).sentence
    assert "is not known: B200" in cli("plan", str(config), "--device", "abacus").sentence
    assert "--response-tokens is 1e+06, above data.max_response_tokens" in (
        cli("plan", str(config), "--device", "h100", "--response-tokens", "1e6").sentence
    )
    BertConfig(num_hidden_layers=1).save_pretrained(tmp_path / "encoder")
    encoder = cli("plan", str(config), f"model.path={tmp_path / 'encoder'}", "--device", "h100")
    assert "is a BertLMHeadModel, which looks at later tokens too" in encoder.sentence
    for name, size in (("num_hidden_layers", 0), ("hidden_size", -64), ("num_key_value_heads", 0)):
        shape = json.loads((tmp_path / "model" / "config.json").read_text()) | {name: size}
        del shape["layer_types"]
        (tmp_path / "odd").mkdir(exist_ok=True)
        (tmp_path / "odd" / "config.json").write_text(json.dumps(shape))
        odd = cli("plan", str(config), f"model.path={tmp_path / 'odd'}", "--device", "h100").sentence
        assert f"has a {name} of {size} in its config.json: it is at least 1" in odd
    shape = json.loads((tmp_path / "model" / "config.json").read_text())
    shape["num_key_value_heads"] = shape["num_attention_heads"] + 1
    (tmp_path / "odd" / "config.json").write_text(json.dumps(shape))
    odd = cli("plan", str(config), f"model.path={tmp_path / 'odd'}", "--device", "h100").sentence
    assert "in its config.json: the second must divide the first" in odd
    fine_tuning = tmp_path / "sft.yaml"
    fine_tuning.write_text("model: {path: model}\nsft: {data: {train_files: [rows.jsonl]}}\n")
    refused = cli("plan", str(fine_tuning)).sentence
    assert "has settings of sft and no data.train_files: a plan is one of" in refused
    assert "on a CPU with trainer.rehearse_longest_batch=true" in refused
    assert "is not a folder" in cli("plan", str(config), "model.path=nowhere", "--device", "h100").sentence
    other = cli(
        "plan", str(config), "algorithm=ppo", f"critic.path={tmp_path / 'modell'}", "--device", "h100"
    )
    assert f"critic.path '{tmp_path / 'modell'}' is not a folder: the nearest in" in other.sentence


def test_models_at_an_address_are_planned_without_their_weights(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    here = cli("plan", str(config), "--device", "h100", "--json").record
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    there = cli("plan", str(config), f"model.path=file://{tmp_path / 'model'}", "--device", "h100", "--json")
    assert there.record == here
    assert list((tmp_path / "home").rglob("config.json"))
    assert not list((tmp_path / "home").rglob("*.safetensors"))
