"""Rows that come while a run goes on: when they are visited, and that a resume has the same ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import Project, chain_of, resume_in, train_in

from strop.config import ConfigError
from strop.data.sampler import PromptSampler
from strop.data.visit_ids import parse_visit_uid
from strop.run import RunError, RunFolder
from strop.trainer.loop import Trainer
from strop.trainer.records import StepRecord
from strop.trainer.timing import Stages

GENERATOR = '''\
from strop.data import AbstractDataGenerator


class Mine(AbstractDataGenerator):
    """One row before the first step, and one after each step, by what was visited in it."""

    def generate(self, dataset):
        if dataset.batch is None:
            return [dict(dataset[0])] * self.config.first
        visited = sorted(set(dataset.batch.non_tensor_batch["index"]))
        row = dict(dataset[int(visited[-1])])
        return [row | {"extra_info": {"made_of": int(visited[-1]), "rows": len(dataset)}}]
'''

TELLS = '''\
import json
from strop.data import AbstractDataGenerator


class Mine(AbstractDataGenerator):
    """Writes the batch of a step down as a program for verl reads it."""

    def generate(self, dataset):
        batch = dataset.batch
        if batch is not None:
            labels = batch.non_tensor_batch
            told = [
                {
                    "id": labels["id"][row],
                    "prompt_ids": batch.batch["prompts"][row].tolist(),
                    "response_ids": batch.batch["responses"][row].tolist(),
                    "score": float(batch.batch["token_level_scores"][row].sum()),
                    "data_source": labels["data_source"][row],
                    "ground_truth": labels["reward_model"][row]["ground_truth"],
                    "question": labels["raw_prompt"][row][-1]["content"],
                    "extra_info": labels["extra_info"][row],
                    "acc": labels["acc"][row],
                    "same_row": dict(dataset[int(labels["index"][row])])["prompt"],
                }
                for row in range(len(batch))
            ]
            with open(self.config.told, "w") as file:
                json.dump(told, file)
        return []
'''

CLASS = '''\
from strop.data import RLHFDataset


class Mine(RLHFDataset):
    """Repeats its first row once more after each step."""

    more = 0

    def on_batch_end(self, batch):
        assert "index" in batch.non_tensor_batch
        self.more += 1

    def __len__(self):
        return len(self.dataframe) + self.more

    def __getitem__(self, item):
        return super().__getitem__(item if item < len(self.dataframe) else 0)
'''


def growing(project: Project, tmp_path: Path, *more: str, first: int = 0) -> list[str]:
    (tmp_path / "rows.py").write_text(GENERATOR)
    path = tmp_path / "rows.py"
    return [
        f"data.datagen={{path: '{path}', name: Mine, kwargs: {{first: {first}}}}}", "data.max_train_prompts=4",
        "data.prompts_per_step=3", "trainer.max_steps=5", *more,
    ]  # fmt: skip


def visits(run: Path) -> list[list[tuple[int, int]]]:
    with RunFolder.open(run, read_only=True) as folder:
        issued = folder.events.read("issued")
    return [[parse_visit_uid(uid) for uid in event["samples"]] for event in issued]


@pytest.mark.slow
def test_new_rows_are_visited_from_the_next_epoch_on(project: Project, tmp_path: Path) -> None:
    done = train_in(tmp_path / "run", project.config(*growing(project, tmp_path)))
    by_epoch: dict[int, list[int]] = {}
    for epoch, row in [one for step in visits(done.folder) for one in step]:
        by_epoch.setdefault(epoch, []).append(row)
    files = sorted(by_epoch[0])
    assert len(files) == 4
    # Step 1 is within epoch 0, step 2 within epoch 1: a row joins the first epoch that has not begun.
    assert len(by_epoch[1]) == 5, "the row of step 1"
    assert all(len(rows) == len(set(rows)) for rows in by_epoch.values())
    new = sorted(set(by_epoch[1]) - set(files))
    assert new == [24], "numbered after all rows of the files"
    assert [step["training/grown_rows"] for step in done.steps] == [1, 2, 3, 4, 5]
    lines = [json.loads(line) for line in (done.folder / "grown.jsonl").read_text().splitlines()]
    assert [line[0] for line in lines] == [1, 2, 3, 4, 5]
    assert [line[2][0]["extra_info"]["rows"] for line in lines] == [24, 25, 26, 27, 28]


def test_rows_of_before_the_first_step_are_in_the_first_epoch(project: Project, tmp_path: Path) -> None:
    config = project.config(*growing(project, tmp_path, "trainer.max_steps=2", first=2))
    done = train_in(tmp_path / "run", config)
    first = [row for step in visits(done.folder) for epoch, row in step if epoch == 0]
    assert sorted(row for row in first if row >= 24) == [24, 25]


def test_a_generator_is_told_the_batch_as_verl_hands_it(project: Project, tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    told_file = tmp_path / "told.json"
    config = project.config(
        f"data.datagen={{path: '{tmp_path / 'tells.py'}', name: Mine, kwargs: {{told: '{told_file}'}}}}",
        "trainer.max_steps=1", "data.prompts_per_step=2",
    )  # fmt: skip
    done = train_in(tmp_path / "run", config)
    told = {row["id"]: row for row in json.loads(told_file.read_text())}
    with RunFolder.open(done.folder, read_only=True) as run:
        samples = {row["id"]: row for row in run.samples.read(1)}
    assert len(told) == 8
    assert told.keys() == samples.keys()
    for name, row in told.items():
        sample = samples[name]
        for key in ("prompt_ids", "response_ids", "data_source", "ground_truth"):
            assert row[key] == sample[key], key
        assert row["score"] == pytest.approx(sample["score"])
        assert row["acc"] == sample["reward_parts"]["acc"]
        assert row["question"] in sample["prompt"]
        assert row["question"] in str(row["same_row"])
        assert isinstance(row["extra_info"], dict)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_rows_in_the_same_order(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = project.config(*growing(project, tmp_path, "run.save_every=2", first=1))
    whole = train_in(tmp_path / "whole", config)
    step = Trainer.step

    def broken(trainer: Trainer, number: int, stages: Stages) -> StepRecord:
        if number == 4:
            raise ZeroDivisionError
        return step(trainer, number, stages)

    monkeypatch.setattr(Trainer, "step", broken)
    with pytest.raises(ZeroDivisionError):
        train_in(tmp_path / "run", config)
    assert len((tmp_path / "run" / "grown.jsonl").read_text().splitlines()) == 4, "those of step 3 too"
    monkeypatch.setattr(Trainer, "step", step)
    resume_in(tmp_path / "run")
    assert [one.chain for one in chain_of(tmp_path / "run")] == [one.chain for one in whole.chain]
    assert (tmp_path / "run" / "grown.jsonl").read_text() == (tmp_path / "whole" / "grown.jsonl").read_text()


@pytest.mark.slow
def test_a_dataset_class_that_hears_of_batches_adds_rows(project: Project, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CLASS)
    settings = [
        f"data.dataset_class={{path: '{tmp_path / 'mine.py'}', name: Mine}}", "data.prompts_per_step=24",
        "data.val_files=[]",
    ]  # fmt: skip
    done = train_in(tmp_path / "run", project.config(*settings, "trainer.max_steps=2"))
    assert [len(step) for step in visits(done.folder)] == [24, 24]
    assert (1, 24) in visits(done.folder)[1]
    with pytest.raises(ValueError, match="has on_batch_end, which may add rows.*set trainer.max_steps"):
        train_in(tmp_path / "other", project.config(*settings, "trainer.max_steps=null"))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["trainer.max_steps=null"], "epochs do not tell how many steps there are: set trainer.max_steps"),
        (["data.streaming=true"], "data.streaming=true wants to know all of them before"),
        (["data.source_weights={x: 2}"], "data.source_weights wants to know all of them before"),
    ],
)
def test_what_does_not_go_with_rows_that_come_later(
    more: list[str], sentence: str, project: Project, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        project.config(*growing(project, tmp_path, *more))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("class Mine: pass", "no class of that name with a method generate"),
        ("class Mine:\n def __init__(self): pass\n def generate(self, d): pass", "cannot be made: TypeError"),
        (
            "class Mine:\n def __init__(self, c): pass\n def generate(self, d): 1 / 0",
            "generate failed with ZeroDiv",
        ),
        (
            "class Mine:\n def __init__(self, c): pass\n def generate(self, d): return 3",
            "generate returned a int",
        ),
        (
            "class Mine:\n def __init__(self, c): pass\n def generate(self, d): return [{'x': 1}]",
            "train row 24 has no value for 'prompt'",
        ),
    ],
)
def test_what_is_wrong_with_a_generator_is_said(
    source: str, sentence: str, project: Project, tmp_path: Path
) -> None:
    settings = growing(project, tmp_path)
    (tmp_path / "rows.py").write_text(source)
    with pytest.raises(ValueError, match=sentence):
        train_in(tmp_path / "run", project.config(*settings))


def test_a_damaged_file_of_rows_is_one_sentence(project: Project, tmp_path: Path) -> None:
    settings = growing(project, tmp_path, "trainer.max_steps=1")
    run = train_in(tmp_path / "run", project.config(*settings)).folder
    (run / "grown.jsonl").write_text("{]\n")
    with pytest.raises(RunError, match=r"line 1 of .*grown.jsonl is damaged"):
        resume_in(run, "trainer.max_steps=2")


def test_the_order_of_an_epoch_does_not_depend_on_when_later_rows_came() -> None:
    early, late = (PromptSampler(range(6), 4, 0) for _ in range(2))
    early.grow([6, 7], first_epoch=1)
    first = [early.next(), late.next()]
    late.grow([6, 7], first_epoch=1)
    assert first[0] == first[1]
    assert [early.next() for _ in range(3)] == [late.next() for _ in range(3)]
