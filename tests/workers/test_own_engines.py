"""A rollout engine and a tracker of the user's own, as the documentation has them."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from docs.doc_pages import ROOT, blocks

from strop.cli.main import main
from strop.cli.quickstart.task import write_task
from strop.config import ConfigError
from strop.data.tiny_model import make_tiny_model
from strop.rollout.registry import check_engine_name, engines
from strop.trainer.loading import load
from strop.utils import registry

COUNTING = """
    async def generate(self, request_id, prompt_ids, sampling, **options):
        output = await super().generate(request_id, prompt_ids, sampling, **options)
        with open(LOG, "a") as file:
            file.write(f"{request_id} {len(output.token_ids)} {output.versions[0]}\\n")
        return output
"""
"""Makes the engine of the page note what it was asked for."""


def file_of(page: str, name: str) -> str:
    """The text that a page of the documentation gives a file."""
    (text,) = [block.text for block in blocks(ROOT / "docs" / page) if block.notes.get("file") == name]
    return text


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return ord((solution_str or " ")[0]) % 7 / 10
"""


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    make_tiny_model(
        tmp_path / "model", seed=0, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        intermediate_size=64, max_position_embeddings=128,
    )  # fmt: skip
    task = write_task(tmp_path / "data", seed=0, num_train=4, num_val=2, num_sft=2)
    (tmp_path / "reward.py").write_text(REWARD)
    before, engine, after = file_of("rollout.md", "engine.py").partition("class Mine(NativeEngine):\n")
    log = f"LOG = {str(tmp_path / 'asked.txt')!r}\n"
    (tmp_path / "engine.py").write_text(
        (log + before + engine + COUNTING + after).replace('"mine"', repr(tmp_path.name))
    )
    (tmp_path / "lines.py").write_text(
        file_of("run-folder.md", "lines.py").replace('"lines"', repr(tmp_path.name))
    )
    return [
        f"model.path='{tmp_path / 'model'}'", f"data.train_files=['{task.train}']", f"data.val_files=['{task.val}']",
        "data.prompts_per_step=2", "data.max_prompt_tokens=24", "data.max_response_tokens=4",
        "rollout.samples_per_prompt=2", f"reward.path='{tmp_path / 'reward.py'}'", "reward.num_workers=1",
        f"rollout.engine={tmp_path.name}",
        f"algorithm.extensions=['{tmp_path / 'engine.py'}','{tmp_path / 'lines.py'}']",
        f"trainer.trackers=[jsonl,{tmp_path.name}]", "trainer.preflight=false", "resources.num_threads=1",
    ]  # fmt: skip


def asked(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "asked.txt").read_text().splitlines()]


def test_it_trains_and_is_evaluated(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *settings, "trainer.max_steps=2", "eval.every=0", "--out", str(run)]) == 0
    trained = [line for line in asked(tmp_path) if line[0].startswith("e0-")]
    assert len(trained) == 8
    assert {version for _, _, version in trained} == {"0", "1"}, "it has the weights of each step"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    means = [(line["step"], line["critic/rewards/mean"]) for line in lines if "actor/loss" in line]
    assert [step for step, _ in means] == [1, 2]
    tracked = [line.split() for line in (run / "lines.txt").read_text().splitlines()]
    assert [(int(step), float(mean)) for step, mean in tracked if mean != "None"] == means
    before = len(asked(tmp_path))
    assert main(["eval", str(run), "--json"]) == 0
    assert len(asked(tmp_path)) == before + 2
    assert "rollout: " in capsys.readouterr().err


def test_an_unknown_engine_is_refused_with_the_known_ones(settings: list[str], tmp_path: Path) -> None:
    others = [word for word in settings if "extensions" not in word]
    engines.pop(tmp_path.name, None)
    with pytest.raises(
        ConfigError,
        match=r"unknown rollout engine 'vlmm'; known: native, .*sglang, .*vllm\. Did you mean vllm\?",
    ):
        load(overrides=[*others, "rollout.engine=vlmm"])
    assert load(overrides=settings).rollout.engine == tmp_path.name


def test_an_engine_named_like_a_built_in_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def mine(place: object) -> None:
        """Never called."""

    with monkeypatch.context() as patch:
        patch.setitem(engines, "vllm", mine)
        with pytest.raises(
            ValueError, match=r"rollout engine 'vllm' is built in, and .*mine is registered under the"
        ):
            check_engine_name("vllm")
    check_engine_name("vllm")


def test_an_engine_of_a_package_is_imported_when_its_name_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("far", "no_such_engine", "strop.rollout_engines")
    monkeypatch.setattr(
        registry, "packaged", lambda group: {"far": (entry,)} if group == engines.group else {}
    )
    with pytest.raises(
        ValueError, match=r"installed package no_such_engine .* cannot be imported: ModuleNotFoundErr"
    ):
        check_engine_name("far")
