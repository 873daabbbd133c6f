"""Whole runs whose prompts are read when they are visited, and runs on rows of a class of the user's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_ray_runs import cut_after
from tiny_runs import Project, check_records, resume_in, train_in

from strop.config.errors import ConfigError
from strop.data import read_rows
from strop.run import RunFolder

STREAMED = ["data.streaming=true"]


def with_long_rows(project: Project, folder: Path) -> list[str]:
    """The training rows with every third one too long, as overrides."""
    rows = read_rows([project.task.train])
    for row in rows[::3]:
        row["prompt"] = [{"role": "user", "content": "1+" * 30 + "1"}]
    path = folder / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*STREAMED, f"data.train_files=['{path}']", f"data.cache_dir='{folder / 'cache'}'"]


SHORT = ["trainer.max_steps=2", "data.val_files=[]"]


@pytest.fixture(scope="module")
def held(project: Project, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of the steps of a run that holds its rows."""
    done = train_in(tmp_path_factory.mktemp("held") / "run", project.config(*SHORT))
    assert "training/overlong_prompts" not in done.steps[0]
    return [one.chain for one in done.chain]


def test_a_streamed_run_is_the_run_that_holds_its_rows(
    project: Project, tmp_path: Path, held: list[str]
) -> None:
    cache = f"data.cache_dir='{tmp_path / 'cache'}'"
    done = train_in(tmp_path / "run", project.config(*SHORT, *STREAMED, cache))
    assert [one.chain for one in done.chain] == held
    assert [step["training/overlong_prompts"] for step in done.steps] == [0.0, 0.0]


@pytest.mark.slow
def test_long_prompts_are_counted_and_a_resumed_run_is_the_one_that_was_not(
    project: Project, tmp_path: Path
) -> None:
    config = project.config(
        *with_long_rows(project, tmp_path),
        "trainer.max_steps=3",
        "data.val_files=[]",
        "run.save_every=1",
        "run.keep_last=9",
    )
    whole = train_in(tmp_path / "whole", config)
    check_records(whole.folder, num_steps=3)
    assert all(len(record.prompts) == 4 for record in whole.records)
    counted = sum(step["training/overlong_prompts"] for step in whole.steps)
    assert counted > 0
    with RunFolder.open(whole.folder, read_only=True) as run:
        counts = run.ledger.counts()
        reasons = {
            reason: len(samples)
            for event in run.events.read("settled")
            for reason, samples in event["fates"].get("filtered", {}).items()
        }
    assert counts["filtered"] == 4 * counted, "four samples of each"
    assert list(reasons) == ["prompt longer than data.max_prompt_tokens=24"]
    assert counts["trained"] == 3 * 4 * 4
    again = resume_in(cut_after(whole.folder, tmp_path / "cut", step=1))
    assert [one.chain for one in again.chain] == [one.chain for one in whole.chain]
    shutil.rmtree(tmp_path / "cut")


def test_streaming_with_a_filter_needs_a_number_of_steps(project: Project) -> None:
    with pytest.raises(ConfigError, match="data.streaming passes over prompts.*set trainer.max_steps"):
        project.config(*STREAMED, "trainer.max_steps=null")
    cut = [*STREAMED, "data.filter_overlong_prompts=false", "data.truncation=left"]
    assert project.config(*cut, "trainer.max_steps=null").num_epochs == 4


CLASS = """\
import pyarrow.parquet


class Mine:
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.rows = pyarrow.parquet.read_table(data_files[0]).to_pylist()
        self.prompt_key = config.prompt_key

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {**self.rows[i], "raw_prompt": self.rows[i][self.prompt_key], "index": i}
"""


def test_a_run_on_rows_of_a_class_is_that_on_its_files(
    project: Project, tmp_path: Path, held: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(CLASS)
    mine = f"data.dataset_class={{path: '{tmp_path / 'mine.py'}', name: Mine}}"
    done = train_in(tmp_path / "run", project.config(*SHORT, mine, *STREAMED))
    assert [one.chain for one in done.chain] == held
