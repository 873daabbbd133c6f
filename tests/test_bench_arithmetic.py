"""The arithmetic of benchmarks: necessary work, shares of the ceiling, and work that is equal on both sides."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from references.token_passes import TEXT_MODEL
from strop.data.tiny_model import make_tiny_model, make_tiny_tokenizer
from strop.engines.config import ModelConfig
from strop.engines.flops import model_work
from strop.engines.micro_batch import pack
from strop.engines.model import load_model

ROOT = Path(__file__).parent.parent
TINY = {
    "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 48,
}  # fmt: skip


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/update.py`; benchmarks are scripts, and find each other beside themselves."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("update")


@pytest.fixture
def versus(bench: ModuleType) -> ModuleType:
    return importlib.import_module("grpo_vs_trl")


def test_work_of_a_group_by_hand(bench: ModuleType) -> None:
    # Prompt of 3, answers of 1 and 3: inputs 3 + 0 + 2, predictions 1 + 3; the prompt sees 1 + 2 + 3 tokens, the two
    # tokens behind it 4 and 5.
    work = bench.work_of([bench.Group(3, (1, 3))])
    assert (work.tokens, work.predictions, work.pairs) == (5, 4, 15)
    # A layer has 8 (2 * 2 * 4 + 2 * 1 * 4 + 3 * 16) = 576 weights, the head 8 * 10.
    size = {
        "hidden_size": 8, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "intermediate_size": 16,
    }  # fmt: skip
    assert work.forward(size, 10) == 2 * (3 * 576 * 5 + 80 * 4) + 4 * 4 * 2 * 3 * 15


@pytest.mark.parametrize("shape", ["words", "full", "2to1", "8to1", "long"])
def test_work_is_that_of_the_pass_that_is_run(bench: ModuleType, shape: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, seed=0, **TINY)
    model = load_model(ModelConfig(path=str(tmp_path)), device="cpu")
    counted = model_work(model)
    assert counted is not None
    groups = bench.groups_of(shape, 2)
    tokens = pack(bench.rows_of(groups), TEXT_MODEL)
    work = bench.work_of(groups)
    assert work.tokens == tokens.num_tokens
    assert 3 * work.forward(TINY, model.vocab_size) == counted.training(tokens)


def test_a_share_is_of_the_fastest_try(bench: ModuleType) -> None:
    facts = bench._facts([0.5, 0.25, 1.0], 10.0, 80.0, 100, 7)
    assert facts["ceiling_share"] == 0.5  # 10 operations at 80 a second take 1/8 s
    assert facts["tokens_per_s"] == 400
    assert facts["seconds"] == {"least": 0.25, "median": 0.5}


@pytest.mark.parametrize("mean", [64, 256])
def test_prompts_of_both_sides_have_the_lengths_of_one_list(
    versus: ModuleType, mean: int, tmp_path: Path
) -> None:
    lengths = versus.prompt_lengths(mean, 64)
    assert lengths == versus.prompt_lengths(mean, 64)
    assert min(lengths) >= mean // 2
    assert max(lengths) <= 3 * mean // 2
    assert len(set(lengths)) > 10
    assert all(statistics.mean(lengths[step : step + 8]) == mean for step in range(0, 64, 8))
    versus.write_prompts_of(lengths, tmp_path / "data.jsonl")
    tokenizer = make_tiny_tokenizer()
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    rendered = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True) for row in rows]
    assert [len(ids["input_ids"]) for ids in rendered] == lengths


def test_an_endless_model_never_ends_and_is_undecided_otherwise(versus: ModuleType, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "raw", seed=0, **TINY)
    versus.make_endless(tmp_path / "raw", tmp_path / "endless")
    model = versus.AutoModelForCausalLM.from_pretrained(tmp_path / "endless")
    ids = torch.randint(7, 102, (8, 60), generator=torch.Generator().manual_seed(0))
    ids[:, 20] = make_tiny_tokenizer().eos_token_id
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    log_probs = output.logits[:, 21:].log_softmax(-1)
    assert (output.hidden_states[-2][:, 21:, 0] == 1).all()  # no layer writes to the first number
    assert log_probs[..., make_tiny_tokenizer().eos_token_id].max() < -30
    assert -(log_probs.exp() * log_probs.clamp(min=-1e3)).sum(-1).min() > 3  # of log(102) = 4.6


def test_operations_of_a_step_follow_from_its_prompts_and_mean_length(
    versus: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    versus.write_prompts_of([10, 20, 30, 40], path)
    workload = versus.Workload("2to1", tmp_path, path, "letters", 64)
    counted = slice(1, None)
    scale = replace(versus.SCALES["small"], prompts=2)
    found = versus._operations(workload, "small", {"lengths": [9.0, 5.2, 6.0]}, counted, scale)
    update = importlib.import_module("update")
    steps = [
        update.work_of([update.Group(prompt, (answer,) * 8) for prompt in prompts])
        for prompts, answer in (((30, 40), 5), ((10, 20), 6))
    ]
    vocab = len(make_tiny_tokenizer())
    size = importlib.import_module("sizes").SIZES["small"]
    assert found == statistics.mean(3 * step.forward(size, vocab) for step in steps)


def test_the_share_of_an_update_is_that_of_workloads_whose_rows_all_have_a_gradient(
    versus: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    versus.write_prompts_of([10] * 8, path)
    phases = {"gen": 1.0, "adv": 0.0, "update_actor": 2.0, "other": 0.5}
    run = {"seconds": [4.0] * 4, "phases": [phases] * 4, "lengths": [6.0] * 4, "versions": {}}
    monkeypatch.setattr(versus, "_strop", lambda *_: run)
    monkeypatch.setattr(versus, "_trl", lambda *_: run)
    ceiling = importlib.import_module("ceiling")
    gflops = iter([3.0, 5.0, 5.0, 3.0])
    monkeypatch.setattr(
        versus, "product_ceiling", lambda _: ceiling.Ceiling(next(gflops) * 1e9, "torch", (1, 1, 1))
    )
    options = argparse.Namespace(size="small", rounds=1, trl_python=Path("-"))
    scale = replace(versus.SCALES["small"], steps=2)
    whole = versus.Workload("2to1", tmp_path, path, "letters", 64)
    found = versus._measure(options, scale, tmp_path, whole, {"features": []})
    operations = versus._operations(whole, "small", run, slice(2, None), scale)
    assert found["ceiling"]["gflops"] == 5.0  # the larger one of before and after
    assert found["ceiling_share_update"] == round(operations / 5e9 / 2.0, 3) > 0
    assert (found["ratio"], found["is_equal_work"], found["phases_s_trl"]) == (1.0, True, phases)
    part = versus.Workload("words", tmp_path, path, "position", 64)
    assert versus._measure(options, scale, tmp_path, part, {"features": []})["ceiling_share_update"] is None


@pytest.mark.parametrize(
    ("other", "is_equal"),
    [({}, True), ({"float32": 7.0}, False), ({"bfloat16": 7.0}, False), ({"64x1": 7.0}, True)],
)
def test_each_side_counts_at_its_fastest_setting_and_in_float32(
    other: dict[str, float],
    is_equal: bool,
    versus: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    step_s = {"float32": 2.0, "bfloat16": 1.0, "64x1": 6.0, "32x2": 5.0, "64x1-bf16": 4.0}
    started: list[str] = []

    def run(setting: str) -> dict[str, object]:
        started.append(setting)
        phases = dict.fromkeys([*versus.PHASES, versus.OTHER], step_s[setting] / 4)
        return {
            "seconds": [step_s[setting]] * 4,
            "phases": [phases] * 4,
            "lengths": [other.get(setting, 6.0)] * 4,
            "versions": {},
        }

    monkeypatch.setattr(versus, "_strop", lambda *given: run(given[-1]))
    monkeypatch.setattr(versus, "_trl", lambda *given: run(given[-3]))
    ceiling = importlib.import_module("ceiling").Ceiling(1e9, "torch", (1, 1, 1))
    monkeypatch.setattr(versus, "product_ceiling", lambda _: ceiling)
    options = argparse.Namespace(size="small", rounds=2, trl_python=Path("-"))
    scale = replace(versus.SCALES["small"], steps=2)
    workload = versus.Workload("words", tmp_path, tmp_path / "data.jsonl", "position", 64)
    found = versus._measure(options, scale, tmp_path, workload, {"features": ["amx_bf16"]})
    assert (found["ratio"], found["ratio_float32"], found["is_equal_work"]) == (4.0, 2.5, is_equal)
    assert found["mean_response_tokens"] == {one: other.get(one, 6.0) for one in ("float32", "bfloat16")}
    assert (found["setting"], found["trl_setting"]) == ("bfloat16", "64x1-bf16")
    assert (found["step_s"], found["phases_s"]["gen"], found["phases_s_trl"]["gen"]) == (1.0, 0.25, 1.0)
    assert started[5:] == [
        "bfloat16",
        "float32",
        "64x1-bf16",
        "32x2",
    ]  # the second round has the fastest alone


def test_the_rest_of_a_step_is_what_its_phases_leave(versus: ModuleType) -> None:
    timing = {"timing_s/step": 4.0, "timing_s/gen": 1.0, "timing_s/adv": 0.5, "timing_s/update_actor": 2.0}
    assert versus._phases_of(timing)["other"] == 0.5


@pytest.mark.parametrize(
    ("features", "tried"),
    [
        (["avx2", "avx512f"], ["64x1"]),
        *(([word], ["64x1", "64x1-bf16"]) for word in ("avx512_bf16", "amx_bf16", "bf16")),
    ],
)
def test_bfloat16_is_tried_where_the_processor_has_it(
    versus: ModuleType, features: list[str], tried: list[str]
) -> None:
    assert versus.tried(["64x1", "64x1-bf16"], {"features": features}) == tried


def test_shapes_of_ones_own_are_named_by_their_tokens(versus: ModuleType) -> None:
    assert versus.lengths_of("300:48") == (300, 48)
    assert [versus.lengths_of(name) for name in ("words", "8to1")] == [(32, 32), (256, 32)]
    assert [versus.ratio_name(name) for name in ("words", "300:48")] == ["ratio_trl", "ratio_trl_300:48"]
    of_five = replace(versus.SCALES["small"], prompts=5, samples=3)
    assert of_five.trl_settings == ("15x1", "15x1-bf16")  # an odd number is not halved
    assert replace(of_five, samples=4).trl_settings == ("20x1", "10x2", "20x1-bf16")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--workloads", "words,300"], "there is no workload '300': give words"),
        (["--workloads", "4:8"], "4:8 is too short: prompts need 8 tokens on average"),
        (
            ["--workloads", "12000:500"],
            "12000:500 is too long: a prompt and its answer have up to 18500 tokens",
        ),
        (["--workloads", "words,2to1,words"], "a workload is given twice"),
        (["--samples", "1"], "argument --samples: 1 is below 2"),
        (["--steps", "0"], "argument --steps: 0 is below 1"),
    ],
)
def test_options_that_cannot_be_measured_are_refused_before_anything_runs(
    versus: ModuleType,
    options: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo_vs_trl.py", *options])
    with pytest.raises(SystemExit):
        versus.main()
    assert sentence in capsys.readouterr().err
