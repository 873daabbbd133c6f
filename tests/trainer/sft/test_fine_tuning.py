"""Supervised fine-tuning: the loss of a run, its records, and its continuation."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer.tiny_experts import make_expert_model
from trainer.tiny_runs import Project, chain_of, check_records
from transformers import AutoModelForCausalLM, AutoTokenizer

from references import megatron_in_workers
from strop.config import load_config
from strop.data.sampler import PromptSampler
from strop.data.sft.config import SftConfig
from strop.engines.config import EngineConfig
from strop.observability.trackers.setup import read_metrics
from strop.run import RunError, RunFolder
from strop.run.first_difference import compare
from strop.trainer.checkpointing import Checkpointer
from strop.trainer.config import Config
from strop.trainer.sft.trainer import SftResult, SftTrainer, fine_tune
from strop.trainer.start import resume_run, start_run
from strop.trainer.timing import Stages
from strop.trainer.untrusted_runs.own import record


def tune(folder: Path, config: Config) -> tuple[SftResult, list[str]]:
    said: list[str] = []
    start = start_run(folder, config, command=["strop", "sft"])
    with start.run:
        return fine_tune(config, start.run, say=said.append), said


def resume(folder: Path) -> tuple[SftResult, list[str]]:
    said: list[str] = []
    start = resume_run(folder, say=said.append)
    with start.run:
        return fine_tune(start.config, start.run, checkpoint=start.checkpoint, say=said.append), said


@pytest.fixture(scope="module")
def sft_config(project: Project) -> Config:
    """24 conversations, 5 per update, 3 epochs: 15 updates, a checkpoint every 2."""
    return project.config(
        f"sft.data.val_files=['{project.task.sft}']",
        "run.save_every=2",
        "sft.optim.schedule=cosine",
        "eval.before_train=false",
    )


@pytest.fixture(scope="module")
def tuned(project: Project, sft_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    tune(folder, sft_config)
    return folder


def test_the_first_loss_is_that_of_assistant_tokens_in_an_independent_reference(
    project: Project, tuned: Path
) -> None:
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(project.task.sft).to_pylist()
    order = [row for _, row in PromptSampler(range(24), 5, seed=0, num_epochs=3).next()]
    tokenizer = AutoTokenizer.from_pretrained(project.model)
    model = AutoModelForCausalLM.from_pretrained(project.model)
    losses = []
    for row in order:
        user, assistant = rows[row]["messages"]
        given = tokenizer(f"<|user|>{user['content']}<|im_end|><|assistant|>")["input_ids"]
        trained = tokenizer(f"{assistant['content']}<|im_end|>")["input_ids"]
        assert len(trained) == 4, "three letters and the end of the turn"
        logits = model(torch.tensor([given + trained])).logits[0, len(given) - 1 : -1]
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(trained), reduction="none").tolist()
    first = read_metrics(tuned / "metrics.jsonl")[0]
    assert len(losses) == 20
    assert first["train/loss"] == pytest.approx(sum(losses) / 20, rel=1e-5)


def test_a_conversation_with_several_turns_trains_all_answers_and_no_question(
    project: Project, tmp_path: Path
) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "bc"},
        {"role": "user", "content": "d?"},
        {"role": "assistant", "content": "e"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    config = project.config(f"sft.data.train_files=['{path}']", "sft.max_steps=1")
    tune(tmp_path / "run", config)
    tokenizer = AutoTokenizer.from_pretrained(project.model)
    model = AutoModelForCausalLM.from_pretrained(project.model)
    losses, ids = [], []
    for message in messages:
        ids += tokenizer(f"<|{message['role']}|>")["input_ids"]
        turn = tokenizer(f"{message['content']}<|im_end|>")["input_ids"]
        if message["role"] == "assistant":
            logits = model(torch.tensor([ids + turn])).logits[0, len(ids) - 1 : -1]
            losses += torch.nn.functional.cross_entropy(logits, torch.tensor(turn), reduction="none").tolist()
        ids += turn
    assert len(losses) == 5
    (numbers,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert numbers["train/loss"] == pytest.approx(sum(losses) / 5, rel=1e-5)


def test_fine_tuning_learns_and_says_what_it_reached(sft_config: Config, tuned: Path, tmp_path: Path) -> None:
    metrics = read_metrics(tuned / "metrics.jsonl")
    assert [numbers["step"] for numbers in metrics] == list(range(1, 16))
    assert metrics[-1]["train/loss"] < metrics[0]["train/loss"] - 0.5
    assert metrics[-1]["val/loss"] < metrics[0]["train/loss"] - 0.5
    assert metrics[-1]["train/lr"] == pytest.approx(0.0, abs=1e-9), "the schedule ends with the run"
    check_records(tuned, num_steps=15)
    with RunFolder.open(tuned, read_only=True) as run:
        assert run.ledger.counts()["trained"] == 72
        assert run.checkpoints.steps() == [14, 15]


@pytest.mark.slow
def test_fine_tuning_twice_gives_one_chain(sft_config: Config, tuned: Path, tmp_path: Path) -> None:
    tune(tmp_path / "run", sft_config)
    assert [one.chain for one in chain_of(tmp_path / "run")] == [one.chain for one in chain_of(tuned)]
    seeded = dataclasses.replace(sft_config, trainer=dataclasses.replace(sft_config.trainer, seed=1))
    tune(tmp_path / "other", seeded)
    difference = compare(chain_of(tuned), chain_of(tmp_path / "other"))
    assert difference is not None
    assert (difference.step, difference.stage) == (1, "data")


def test_validations_come_when_the_settings_say(project: Project, tmp_path: Path) -> None:
    # The validation rows are all training rows in one update, so the loss before it is the loss of the update.
    val = f"sft.data.val_files=['{project.task.sft}']"
    whole = "sft.examples_per_update=24"
    tune(tmp_path / "run", project.config(val, whole, "eval.every=2", "sft.num_epochs=3"))
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(n["step"], "val/loss" in n) for n in metrics] == [(0, True), (1, False), (2, True), (3, True)]
    assert metrics[0]["val/loss"] == pytest.approx(metrics[1]["train/loss"], rel=1e-5)
    assert metrics[2]["val/loss"] == pytest.approx(metrics[3]["train/loss"], rel=1e-5)
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        seen = {event["step"]: event["loss"] for event in run.events.read("validation")}
    assert seen == {n["step"]: n["val/loss"] for n in metrics if "val/loss" in n}


def test_what_cannot_run_is_said_before_the_model_is_loaded(project: Project, tmp_path: Path) -> None:
    for number, (settings, sentence) in enumerate(
        (
            (
                ("sft.engine.sequence_parallel=2",),
                "sft.engine.sequence_parallel is 2, but the role has one rank",
            ),
            (
                ("resources.runtime=ray", "resources.ranks=2", "resources.nodes=2", "resources.min_nodes=1"),
                "resources.min_nodes is 1, but only `strop train` goes on with fewer machines",
            ),
            (
                ("trainer.trackers=[jsonl,wandbb]",),
                "unknown tracker 'wandbb'; known: .*console, jsonl, .*tensorboard",
            ),
        )
    ):
        (tmp_path / "none.jsonl").touch()
        config = project.config(*settings, f"sft.data.train_files=['{tmp_path / 'none.jsonl'}']")
        with pytest.raises(ValueError, match=sentence):
            tune(tmp_path / str(number), config)


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize(
    "where",
    [pytest.param("before the step", marks=pytest.mark.slow), "in the checkpoint", "after the checkpoint"],
)
def test_an_interrupted_fine_tuning_continues_bit_for_bit(
    sft_config: Config, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        if where == "before the step":
            step = SftTrainer._step
            patch.setattr(
                SftTrainer, "_step", lambda self, n, stages: _killed_if(n == 8) or step(self, n, stages)
            )
        else:
            save = Checkpointer.save

            def save_or_die(self: Checkpointer, n: int, *args: object, **kwargs: object) -> None:
                _killed_if(n == 8 and where == "in the checkpoint")
                save(self, n, *args, **kwargs)  # type: ignore[arg-type]
                _killed_if(n == 8)

            patch.setattr(Checkpointer, "save", save_or_die)
        with pytest.raises(Killed):
            tune(folder, sft_config)
    result, said = resume(folder)
    at = 8 if where == "after the checkpoint" else 6
    assert any(line.startswith(f"resumed at step {at}: ") for line in said)
    assert [one.chain for one in chain_of(folder)] == [one.chain for one in chain_of(tuned)]
    check_records(folder, num_steps=15)
    expected = read_metrics(tuned / "metrics.jsonl")
    for ours, theirs in zip(read_metrics(folder / "metrics.jsonl"), expected, strict=True):
        assert ours["train/loss"] == theirs["train/loss"]
        assert ours["train/lr"] == theirs["train/lr"]
    assert result.loss == expected[-1]["train/loss"]
    assert result.val_loss == expected[-1]["val/loss"]


def _killed_if(now: bool) -> None:
    if now:
        raise Killed


def test_a_resume_after_the_last_step_still_knows_the_losses(tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tuned, folder, symlinks=True)
    events = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(line for line in events if '"finished"' not in line))
    result, _ = resume(folder)
    last = read_metrics(tuned / "metrics.jsonl")[-1]
    assert (result.loss, result.val_loss) == (last["train/loss"], last["val/loss"])
    steps = [json.loads(line) for line in events if '"step"' in line and '"seconds"' in line]
    assert result.seconds > sum(event["seconds"] for event in steps if event["kind"] == "step") > 0


def test_fine_tuning_ends_with_the_first_validation_that_reaches_a_loss(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [
        f"sft.data.val_files=['{project.task.sft}']",
        "eval.every=2",
        "run.save_every=3",
        "sft.num_epochs=2",
    ]
    whole, _ = tune(tmp_path / "whole", project.config(*common))
    with RunFolder.open(whole.run, read_only=True) as run:
        losses = {event["step"]: event["loss"] for event in run.events.read("validation")}
    assert sorted(losses) == [0, 2, 4, 6, 8, 10]
    assert sorted(losses.values(), reverse=True) == [losses[step] for step in sorted(losses)]
    target = (losses[4] + losses[6]) / 2
    config = project.config(*common, f"sft.target_loss={target}")
    result, said = tune(tmp_path / "run", config)
    assert (result.steps, result.val_loss) == (6, losses[6])
    last = (
        f"step 6 is the last one: its validation loss of {losses[6]:.4g} reaches sft.target_loss={target:.6g}"
    )
    assert last in said
    assert (result.model / "model.safetensors").is_file()
    expected = [one.chain for one in chain_of(whole.run)]
    assert [one.chain for one in chain_of(result.run)] == expected[:6]
    check_records(result.run, num_steps=6)

    ended = tmp_path / "ended"  # by a crash behind the last checkpoint
    shutil.copytree(result.run, ended, symlinks=True)
    events = (ended / "events.jsonl").read_text().splitlines(keepends=True)
    (ended / "events.jsonl").write_text("".join(line for line in events if '"finished"' not in line))
    assert resume(ended)[0].steps == 6

    killed = tmp_path / "killed"  # between that validation and its checkpoint
    with monkeypatch.context() as patch:
        save = Checkpointer.save
        patch.setattr(
            Checkpointer,
            "save",
            lambda self, n, *args, **kwargs: _killed_if(n == 6) or save(self, n, *args, **kwargs),
        )
        with pytest.raises(Killed):
            tune(killed, config)
    again, said = resume(killed)
    assert any(line.startswith("resumed at step 3: ") for line in said)
    assert again.steps == 6
    assert [one.chain for one in chain_of(killed)] == expected[:6]

    start = resume_run(result.run, overrides=["sft.target_loss=null"], say=said.append)
    with start.run:
        longer = fine_tune(start.config, start.run, checkpoint=start.checkpoint, say=said.append)
    assert longer.steps == 10
    assert [one.chain for one in chain_of(result.run)] == expected


@pytest.mark.parametrize("lacks", ["sft.data.val_files=[]", "eval.every=0"])
def test_a_loss_that_no_validation_can_reach_is_refused(project: Project, tmp_path: Path, lacks: str) -> None:
    given = [f"sft.data.val_files=['{project.task.sft}']", "eval.every=2", "sft.target_loss=1", lacks]
    with pytest.raises(ValueError, match="sft.target_loss is 1, but no validation could end the run there"):
        tune(tmp_path / "run", project.config(*given))


def test_a_resume_where_its_rows_are_not_found_is_refused(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(project.task.sft, home / "rows.parquet")
    monkeypatch.chdir(home)
    config = project.config("sft.data.train_files=[rows.parquet]")
    start_run(tmp_path / "run", config, command=["strop", "sft"]).run.close()
    settings = tmp_path / "run/config.yaml"  # as they were written by versions that kept relative paths
    settings.write_text(settings.read_text().replace(f"{home}/rows.parquet", "rows.parquet"))
    record(settings.read_text())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=f"reads sft.data.train_files=rows.parquet, which is in {home}, where"):
        resume(tmp_path / "run")


def test_a_poisoned_step_is_skipped_and_its_conversations_are_filtered(
    sft_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = SftTrainer._step

    def poisoned(self: SftTrainer, number: int, stages: Stages) -> dict[str, float]:
        if number == 2:
            parameter = next(iter(self._worker.workers[0].engine.model.module.parameters()))
            hook = parameter.register_hook(lambda grad: grad * float("nan"))
            try:
                return step(self, number, stages)
            finally:
                hook.remove()
        return step(self, number, stages)

    monkeypatch.setattr(SftTrainer, "_step", poisoned)
    _, said = tune(tmp_path / "run", sft_config)
    assert any("step 2 skipped an update: gradient norm is nan" in line for line in said)
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        counts = run.ledger.counts()
        weights = [one.stages["weights"] for one in run.fingerprints.read()]
    assert (counts["trained"], counts["filtered"]) == (67, 5)
    assert weights[0] == weights[1] != weights[2]


def test_a_token_budget_below_the_longest_conversation_is_refused() -> None:
    with pytest.raises(
        ValueError, match="sft.engine.max_tokens_per_device is 100, but one conversation may have 1024"
    ):
        Config(sft=SftConfig(engine=EngineConfig(max_tokens_per_device=100)))


def test_fine_tuning_without_files_is_refused(project: Project, tmp_path: Path) -> None:
    config = load_config(Config, overrides=[f"model.path='{project.model}'"])
    with pytest.raises(ValueError, match="sft.data.train_files is empty; name at least one"):
        tune(tmp_path / "run", config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "axis"),
    [
        (40, "shard_size=0"), (400, "shard_size=0"), (80, "tensor_parallel=2"), (40, "context_parallel=2"),
        (40, "pipeline_parallel=2"), (80, "expert_parallel=2"), (80, "megatron context_parallel=2"),
        (40, "megatron pipeline_parallel=2"),
    ],
)  # fmt: skip
def test_two_ranks_learn_what_one_does_whatever_a_pass_takes(
    project: Project, tmp_path: Path, budget: int, axis: str
) -> None:
    """24 conversations of 5 an update: a rank has 2 or 3 of them. Loss of every step, of held-out rows, and weights."""
    common = [f"sft.data.val_files=['{project.task.sft}']", "eval.every=4", "sft.num_epochs=2"]
    if axis == "expert_parallel=2":
        model = make_expert_model(tmp_path / "experts", project.model)
        common += [f"model.path='{model}'", "sft.moe.balance_loss_coef=0.01"]
    ranks = ["resources.runtime=ray", "resources.ranks=2", "resources.cpus_per_rank=0.1"]
    kind, _, axis = axis.rpartition(" ")
    if kind:
        if not megatron_in_workers.IS_INSTALLED:
            pytest.skip("megatron-core is not installed")
        ranks += ["model.external_lib=references.megatron_in_workers"]
        ranks += [f"sft.engine.{setting}" for setting in megatron_in_workers.SETTINGS]
    one, _ = tune(tmp_path / "one", project.config(*common))
    cut = [f"sft.engine.max_tokens_per_device={budget}", f"sft.engine.{axis}"]
    two, _ = tune(tmp_path / "two", project.config(*common, *ranks, *cut))
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    assert [set(line) & {"val/loss"} for line in ours] == [set(line) & {"val/loss"} for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for name in {"train/loss", "train/grad_norm", "val/loss"} & set(other):
            assert mine[name] == pytest.approx(other[name], rel=2e-4), (name, mine["step"])
    weights = [load_file(run.model / "model.safetensors") for run in (one, two)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=3e-4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["sft.optim.lr=1"], "that destroys what a trained model has learned; usual are 1e-5 to 5e-5, 1e-4 "),
        (["sft.optim.lr=0.02"], "that may destroy what a trained model has learned; usual are 1e-5 to 5e-5"),
        (
            ["sft.optim.lr=1", "model.lora.rank=4"],
            "that destroys what a trained model has learned; usual are 1e-4 to ",
        ),
        (["sft.optim.lr=0.02", "model.lora.rank=4"], None),
    ],
)
def test_a_learning_rate_that_is_too_large_is_said_at_the_start(
    project: Project, tmp_path: Path, settings: list[str], sentence: str | None
) -> None:
    # Weights are about 0.05 in size, and AdamW's first update moves each by the learning rate.
    (tmp_path / "none.jsonl").touch()
    words = [
        f"model.path='{project.model}'",
        *settings,
        f"sft.data.train_files=['{tmp_path / 'none.jsonl'}']",
    ]
    said: list[str] = []
    with (
        start_run(
            tmp_path / "run", load_config(Config, overrides=words), command=["strop", "sft"]
        ).run as run,
        pytest.raises(ValueError, match="has no rows"),
    ):
        fine_tune(load_config(Config, overrides=words), run, say=said.append)
    lines = [line for line in said if line.startswith("WARNING: sft.optim.lr=")]
    assert len(lines) == (sentence is not None)
    assert sentence is None or sentence in lines[0]
