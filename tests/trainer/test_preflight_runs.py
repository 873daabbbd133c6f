"""Preflights of real runs: the samples are those of the first step, what is wrong is found, and nothing is changed."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import (
    Done,
    Project,
    chain_of,
    check_records,
    resume_in,
    to_reward_model,
    train_in,
    with_reward,
)

from strop.cli.main import main
from strop.config import save_config
from strop.data.tiny_model import make_tiny_model
from strop.run import RunFolder
from strop.trainer.config import Config
from strop.trainer.loop import Trainer
from strop.trainer.preflight.facts import token_facts
from strop.trainer.preflight.of_run import was_tried
from strop.trainer.preflight.tokens import AnswerEnd
from strop.trainer.preflight.trial import RunRefused, answer_line, first_prompts, run_preflight
from strop.trainer.setup import load_training_data
from strop.trainer.start import start_run

PREFLIGHT = "trainer.preflight=true"


@pytest.fixture
def flat(project: Project, tmp_path: Path) -> Config:
    """A run whose rewards are all the same."""
    (tmp_path / "flat.py").write_text("def compute_score(**row):\n    return 0.0\n")
    return with_reward(project.config(PREFLIGHT, "trainer.max_steps=1"), path=str(tmp_path / "flat.py"))


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    with RunFolder.open(folder, read_only=True) as run:
        return run.events.read(kind)


# --------------------------------------------------------------------------------------- what is played


def test_its_samples_are_those_of_the_first_step(project: Project, on_policy: Done) -> None:
    found = run_preflight(project.config(), num_prompts=4)
    first = {report.id: report for report in on_policy.records[0].reports}
    assert [row["id"] for row in found.samples] == list(first)[:10], "16 samples: ten, one by one"
    assert all(row["score"] == first[row["id"]].score for row in found.samples)
    assert all(row["reward"] == pytest.approx(row["score"]) for row in found.samples)
    assert not any(", reward " in line for line in found.lines()), "it is the score"
    with RunFolder.open(on_policy.folder, read_only=True) as run:
        kept = {row["id"]: row["response"] for row in run.samples.read(1)}
    assert all(row["response"] == kept[row["id"]] for row in found.samples)
    checks = {check.name: check for check in found.checks}
    assert list(checks) == [
        "vocabulary", "template", "end of answer", "prompts", "length", "scoring", "difficulty", "signal", "loss mask",
        "engine",
    ]  # fmt: skip
    assert {name for name, check in checks.items() if not check.is_fine} <= {"length"}, (
        "random answers do not end"
    )
    assert not found.obstacles
    assert found.seconds > 0


def test_a_reward_that_is_always_the_same_is_found(flat: Config) -> None:
    found = run_preflight(flat, num_prompts=3)
    (signal,) = found.obstacles
    assert "of 3 groups 0 (0 to 56 %) can teach, 0 (0 to 56 %) are solved by every sample, 3 (" in signal.text


def test_scorers_that_all_fail_and_answers_that_cannot_be_kept_are_found(project: Project) -> None:
    config = with_reward(project.config(), name="only_right")
    found = run_preflight(config, num_prompts=3)
    assert {check.name for check in found.obstacles} == {"scoring", "signal"}
    assert "ZeroDivisionError: a wrong answer" in found.refusal()
    assert any("not kept" in line and "ZeroDivisionError" in line for line in found.lines())


def test_a_reward_model_and_a_critic_take_part(project: Project, flat: Config, tmp_path: Path) -> None:
    """The judge tells samples apart that the function scores alike."""
    judge = tmp_path / "judge"
    make_tiny_model(judge, seed=1, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
                    intermediate_size=48, max_position_embeddings=128)  # fmt: skip
    to_reward_model(judge)
    config = project.config(
        f"reward.path='{flat.reward.path}'", f"reward_model.path='{judge}'", "reward_model.max_tokens=128",
        "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true",
    )  # fmt: skip
    found = run_preflight(config, num_prompts=3)
    assert not found.obstacles
    assert any(row["reward"] != row["score"] == 0.0 for row in found.samples)
    assert any(", reward " in line for line in found.lines())


# ----------------------------------------------------------------------------------- as a part of a run


@pytest.fixture(scope="module")
def tried(project: Project) -> Done:
    """The run `on_policy`, with a preflight."""
    kl = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=abs", "algorithm.kl_loss_coef=0.01"]
    return train_in(project.folder / "tried", project.config(*kl, PREFLIGHT))


def test_a_run_with_a_preflight_is_the_run_without(on_policy: Done, tried: Done) -> None:
    assert [one.chain for one in tried.chain] == [one.chain for one in on_policy.chain]
    check_records(tried.folder, num_steps=3)
    names = [sorted(path.name for path in (one.folder / "samples").iterdir()) for one in (on_policy, tried)]
    assert names[0] == names[1]
    rows, ledgers = [], []
    for done in (on_policy, tried):
        with RunFolder.open(done.folder, read_only=True) as run:
            rows.append([{k: v for k, v in row.items() if k != "timings"} for row in run.samples.read()])
            ledgers.append((run.ledger.counts(), run.events.read("issued")[0]["samples"]))
    assert rows[0] == rows[1]
    assert ledgers[0] == ledgers[1]
    timed = ("timing", "perf/", "rollout/tokens_per_s")
    numbers = [
        [{k: v for k, v in step.items() if not k.startswith(timed)} for step in done.metrics]
        for done in (on_policy, tried)
    ]
    assert numbers[0] == numbers[1]


def test_it_is_recorded_and_shown_before_the_first_validation(tried: Done) -> None:
    with RunFolder.open(tried.folder, read_only=True) as run:
        kinds = [event["kind"] for event in run.events.read()]
    assert kinds[:4] == ["created", "roles_started", "preflight", "validation"]
    (event,) = events(tried.folder, "preflight")
    # 48 samples are 12 prompts with 4 samples each, and the first round already has a signal.
    assert (event["verdict"], event["num_prompts"], event["num_samples"]) == ("ready", 12, 48)
    assert sum(", right is " in line for line in tried.said) == 10
    assert any(line.startswith("ready to train; 48 samples in ") for line in tried.said)


def test_a_run_that_cannot_learn_does_not_start(flat: Config, tmp_path: Path) -> None:
    with start_run(tmp_path / "run", flat, command=["strop", "train"]).run as run:
        trainer = Trainer(flat, run, checkpoint=None, say=lambda line: None)
        with pytest.raises(RunRefused, match="every advantage would be 0.*--force") as refusal:
            trainer.fit()
        assert [event["kind"] for event in run.events.read()] == ["created", "roles_started", "preflight"]
        (event,) = run.events.read("preflight")
        # All 24 rows were tried: four rounds of 12 prompts would be more than there are.
        assert (event["verdict"], event["num_prompts"]) == ("refused", 24)
        assert "\n" not in str(refusal.value)
        assert not was_tried(run), "going on with it asks again"


def test_a_resumed_run_does_not_repeat_it(tried: Done, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(tried.folder, again, symlinks=True)
    lines = (again / "events.jsonl").read_text().splitlines(keepends=True)
    first_step = next(i for i, line in enumerate(lines) if '"kind":"issued"' in line)
    # Interrupted before its first step: nothing but the preflight and the validation is left.
    (again / "events.jsonl").write_text("".join(lines[:first_step]))
    shutil.rmtree(again / "checkpoints")
    (again / "metrics.jsonl").unlink()
    resumed = resume_in(again)
    assert not any(", right is " in line for line in resumed.said)
    assert len(events(again, "preflight")) == 1
    assert [one.chain for one in chain_of(again)] == [one.chain for one in tried.chain]


# --------------------------------------------------------------------------------------------- commands


def test_a_right_answer_is_shown_where_the_row_has_one() -> None:
    sample = {"id": "e0-000001/0", "score": 1.0, "reward": 1.0, "response": "4", "pred": None, "error": ""}
    assert answer_line(sample | {"ground_truth": "4"}) == "e0-000001/0  score 1  '4', right is '4'"
    assert answer_line(sample | {"ground_truth": None}) == "e0-000001/0  score 1  '4'"


@pytest.mark.slow
def test_the_command_shows_answers_and_ends_with_the_verdict(
    project: Project, flat: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_config(project.config(), tmp_path / "run.yaml")
    assert main(["check", str(tmp_path / "run.yaml"), "--prompts", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(", right is " in line for line in lines) == 10
    assert any(
        line.startswith("ok   engine: the engine's and the trainer's log-probs differ") for line in lines
    )
    assert lines[-1].startswith("ready to train; 12 samples in ")
    save_config(flat, tmp_path / "flat.yaml")
    assert main(["check", str(tmp_path / "flat.yaml"), "--prompts", "3", "--json"]) == 1
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["kind"], record["passed"], record["num_samples"]) == ("run", False, 12)
    assert [check["name"] for check in record["checks"] if check["level"] == "stop"] == ["signal"]
    assert len(record["samples"]) == 10
    assert not list(tmp_path.glob("runs/*")), "nothing is written"


@pytest.mark.slow
def test_a_refused_run_leaves_a_sentence_and_no_folder_and_force_starts_it(
    flat: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_config(flat, tmp_path / "flat.yaml")
    folder = tmp_path / "run"
    words = ["train", "--config", str(tmp_path / "flat.yaml"), "--out", str(folder)]
    assert main(words) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(
        "strop train: this run would not learn, so it was not started. signal: rewards from 0 to 0"
    )
    assert not folder.exists()
    assert main([*words, "--force"]) == 0
    assert "started by --force, against signal" in capsys.readouterr().err.splitlines()
    assert [event["verdict"] for event in events(folder, "preflight")] == ["forced"]


# ------------------------------------------------------------------------------------------ the template


def test_the_facts_of_a_model_that_fits(project: Project) -> None:
    config = project.config()
    data = load_training_data(config)
    before = copy.deepcopy(data.sampler).next(2)
    facts = token_facts(config, data.tokenizer, first_prompts(data, 24))
    assert data.sampler.next(2) == before, "the sampler stands where it stood"
    assert (facts.num_prompts, facts.num_changed, facts.num_double_starts) == (24, 0, 0)
    assert (facts.has_opening, facts.num_without_opening, facts.end) == (True, 0, AnswerEnd("stops"))
    assert facts.spelled_out == ()
    assert facts.num_tokens == len(data.tokenizer) <= facts.num_embeddings
    assert 0 < facts.largest_id < facts.num_tokens


def test_the_facts_of_templates_that_do_not_fit(project: Project) -> None:
    config = project.config()
    data = load_training_data(config)
    tokenizer, prompts = data.tokenizer, first_prompts(data, 3)
    start, other = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    tokenizer.bos_token = "<|user|>"
    doubled = [dataclasses.replace(one, token_ids=(start, start, *one.token_ids)) for one in prompts]
    assert token_facts(config, tokenizer, doubled).num_double_starts == 3
    cut = [dataclasses.replace(one, token_ids=one.token_ids[:-1]) for one in prompts]
    assert other == prompts[0].token_ids[-1]
    assert token_facts(config, tokenizer, cut).num_without_opening == 3
    foreign = [dataclasses.replace(one, token_ids=(10**6,)) for one in prompts]
    assert token_facts(config, tokenizer, foreign).largest_id == 10**6
    # Turns that end with another token, which then ends answers, and nothing before an answer.
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '<|user|>' }}{% endfor %}"
    facts = token_facts(config, tokenizer, prompts)
    assert (facts.has_opening, facts.end) == (False, AnswerEnd("stops"))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert token_facts(config, tokenizer, prompts).end == AnswerEnd("nothing")
    # A template of another tokenizer: its markers are spelled out in ordinary characters.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|turn|>' + m['content'] + '<|over|>' }}{% endfor %}"
    )
    facts = token_facts(config, tokenizer, prompts)
    assert facts.end == AnswerEnd("text", "<|over|>")
    assert facts.spelled_out == ("<|turn|>", "<|over|>")
    tokenizer.chat_template = "{{ raise_exception('no answers') }}"
    assert token_facts(config, tokenizer, prompts).end == AnswerEnd("unknown")
