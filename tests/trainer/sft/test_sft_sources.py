"""Fine-tuning on several sources with weights and on the samples of runs, as runs: what is visited, and the resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from cli.cli_calls import cli
from test_fine_tuning import Killed, _killed_if, resume, tune
from trainer.tiny_runs import Project, chain_of, train_in

from strop.data.sft.rows import read_sft_rows
from strop.observability.trackers.setup import read_metrics
from strop.run import RunFolder
from strop.run.samples import SampleStore
from strop.trainer.config import Config
from strop.trainer.sft.trainer import SftTrainer


def mixture(project: Project, folder: Path, *more: str) -> Config:
    """10 rows that say which source they are of, and 24 of a file, which are of that file."""
    chats = [
        {
            "data_source": "mine" if number < 4 else "theirs",
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "bcdefghijk"[number]},
            ],
        }
        for number in range(10)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    return project.config(
        f"sft.data.train_files=['{folder / 'chats.jsonl'}','{project.task.sft}']",
        "sft.data.source_weights={mine: 2, theirs: 0.5, sft: 0.25}",
        "sft.num_epochs=4",
        "sft.examples_per_update=4",
        *more,
    )


def visits(folder: Path) -> Counter[int]:
    with RunFolder.open(folder, read_only=True) as run:
        issued = [name for event in run.events.read("issued") for name in event["ids"]]
    return Counter(int(name.split("-")[1].removesuffix("/0")) for name in issued)


def test_rows_are_visited_as_often_as_the_weight_of_their_source_says(
    project: Project, tmp_path: Path
) -> None:
    config = mixture(project, tmp_path)
    trainer = SftTrainer(config, _new_run(config, tmp_path), checkpoint=None, say=lambda _: None)
    sampler, seen = trainer._sampler, Counter[int]()
    while not sampler.is_finished:
        seen.update(row for _, row in sampler.next())
    assert [seen[row] for row in range(4)] == [8, 8, 8, 8]
    assert [seen[row] for row in range(4, 10)] == [2] * 6
    assert [seen[row] for row in range(10, 34)] == [1] * 24
    assert sampler.num_steps == (32 + 12 + 24) // 4


def _new_run(config: Config, folder: Path) -> RunFolder:
    from strop.trainer.start import start_run

    return start_run(folder / "run", config, command=["strop", "sft"]).run


def test_a_weight_of_a_source_that_no_row_has_is_refused(project: Project, tmp_path: Path) -> None:
    config = project.config("sft.data.source_weights={elsewhere: 2}")
    with pytest.raises(ValueError, match=r"sft\.data\.source_weights names 'elsewhere', but no row has"):
        tune(tmp_path / "run", config)


def test_an_entry_is_a_source_by_its_name_where_no_other_has_it(tmp_path: Path) -> None:
    for name in ("one/train.jsonl", "two/train.jsonl", "three.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "a", "completion": "b"}\n')
    files = [str(tmp_path / name) for name in ("one/train.jsonl", "two/train.jsonl", "three.jsonl")]
    assert read_sft_rows(files).sources == ["one/train.jsonl", "two/train.jsonl", "three"]
    (tmp_path / "three.jsonl").write_text('{"prompt": "a", "completion": "b", "data_source": "own"}\n')
    assert read_sft_rows(files[2:]).sources == ["own"]


@pytest.mark.slow
def test_a_mixture_that_is_interrupted_continues_bit_for_bit(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = mixture(project, tmp_path, "run.save_every=3")
    tune(tmp_path / "whole", config)
    with monkeypatch.context() as patch:
        step = SftTrainer._step
        patch.setattr(
            SftTrainer, "_step", lambda self, n, stages: _killed_if(n == 8) or step(self, n, stages)
        )
        with pytest.raises(Killed):
            tune(tmp_path / "run", config)
    resume(tmp_path / "run")
    whole = chain_of(tmp_path / "whole")
    assert len(whole) == 17
    assert [one.chain for one in chain_of(tmp_path / "run")] == [one.chain for one in whole]


@pytest.mark.slow
def test_the_best_samples_of_a_run_are_imitated_token_by_token(project: Project, tmp_path: Path) -> None:
    config = project.config("trainer.max_steps=2", "data.val_files=[]")
    recorded = train_in(tmp_path / "recorded", config).folder
    settings = [
        f"sft.data.train_files=['{recorded}']", "sft.data.keep.best=1", "sft.examples_per_update=3",
        "sft.num_epochs=2", "run.save_every=1", "run.keep_last=9",
    ]  # fmt: skip
    _, said = tune(tmp_path / "whole", project.config(*settings))
    rows = SampleStore(recorded / "samples").read()
    prompts = {tuple(row["prompt_ids"]) for row in rows}
    assert any(f"; {len(prompts)} of 32 rows kept by their scores" in line for line in said)
    with RunFolder.open(tmp_path / "whole", read_only=True) as run:
        assert run.ledger.counts()["trained"] == 2 * len(prompts)
    best = {
        prompt: max(row["score"] for row in rows if tuple(row["prompt_ids"]) == prompt) for prompt in prompts
    }
    trainer = SftTrainer(
        project.config(*settings),
        _new_run(project.config(*settings), tmp_path / "again"),
        checkpoint=None,
        say=said.append,
    )
    found = [trainer._examples[number] for number in range(len(trainer._examples))]
    for one in found:
        sampled = rows[one.row]
        assert one.token_ids == (*sampled["prompt_ids"], *sampled["response_ids"])
        assert sampled["score"] == best[tuple(sampled["prompt_ids"])]
    losses = [numbers["train/loss"] for numbers in read_metrics(tmp_path / "whole" / "metrics.jsonl")]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_student_learns_from_what_a_teacher_was_logged_to_say(project: Project, tmp_path: Path) -> None:
    asked = tmp_path / "asked.txt"
    asked.write_text("abc\nbca\n")
    logs = {name: tmp_path / f"logs.{name}" for name in ("jsonl", "parquet")}
    for out in logs.values():
        answered = cli(
            "generate", project.model, "--prompts", asked, "--temperature", 1.0, "--samples", 4, "--max-tokens", 4,
            "--top-logprobs", 8, "--out", out,
        )  # fmt: skip
        assert answered.code == 0, answered.err
    common = [
        f"model.path={project.model}", "sft.data.max_tokens=32", "sft.examples_per_update=8", "sft.num_epochs=3",
        "sft.optim.lr=3e-3", "trainer.trackers=[jsonl]", "resources.num_threads=1", "sft.distillation.coef=1",
    ]  # fmt: skip
    chains = []
    for name, file in logs.items():
        out = tmp_path / f"of-{name}"
        result = cli("sft", *common, f"sft.data.train_files=['{file}']", "--out", out, "--json")
        assert result.code == 0, result.err
        chains.append([one.chain for one in chain_of(out)])
    assert chains[0] == chains[1], "both files say the same"
    start = read_metrics(tmp_path / "of-jsonl" / "metrics.jsonl")[0]
    assert start["distillation/loss"] == pytest.approx(0.0, abs=1e-6), "the student is the teacher"
    assert cli("generate", project.model, "--prompts", asked, "--top-logprobs", 8).sentence.endswith(
        "name a file, and 1 or more"
    )
    refused = cli("sft", *common, f"sft.data.train_files=['{project.task.sft}']", "--out", tmp_path / "no")
    assert "the rows have no columns teacher_ids and teacher_logprobs" in refused.sentence
