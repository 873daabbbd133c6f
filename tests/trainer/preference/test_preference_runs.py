"""Runs on preferences: exact whatever the cut and the ranks, learning, resumed, and of use afterwards."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.cli_calls import cli
from preference_task import Task
from safetensors.torch import load_file, save_file
from trainer.tiny_experts import make_expert_model
from trainer.tiny_runs import chain_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from references import megatron_in_workers
from strop.algorithms.losses.preference import Batch, weigh
from strop.data.preference_config import PreferConfig
from strop.data.preference_rows import PreferenceDataset
from strop.data.tiny_model import END_OF_TURN, PAD
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.tokenizer import load_tokenizer
from strop.observability.trackers.setup import read_metrics
from strop.protocol import DataProto
from strop.trainer.config import Config
from strop.trainer.preference.trainer import PreferenceTrainer, preference_batch, train_on_preferences
from strop.trainer.sft.result import SftResult
from strop.trainer.start import resume_run, start_run
from strop.trainer.timing import Stages
from strop.utils.metrics import metric_values
from strop.workers.config import RewardModelConfig
from strop.workers.models import TrainingInit
from strop.workers.preference import PreferenceWorker
from strop.workers.reward_model import RewardModelWorker

AXES = ("shard_size", "tensor_parallel", "context_parallel", "pipeline_parallel")


def train(folder: Path, config: Config) -> SftResult:
    start = start_run(folder, config, command=["strop", "prefer"])
    with start.run:
        return train_on_preferences(config, start.run, say=lambda line: None)


def resume(folder: Path, *overrides: str) -> SftResult:
    start = resume_run(folder, overrides=overrides, say=lambda line: None)
    with start.run:
        return train_on_preferences(
            start.config, start.run, checkpoint=start.checkpoint, say=lambda line: None
        )


def numbers_of(module: Any, example: Any, *, scores: bool) -> list[torch.Tensor]:
    """Of both conversations, each alone through a model of transformers, differentiable."""
    found = []
    for side in example.pair:
        ids = torch.tensor([side.token_ids])
        if scores:
            found.append(module(ids[:, :-1]).logits[0, 0])
            continue
        log_probs = module(ids).logits[0].log_softmax(-1)
        found.append(sum(
            log_probs[place - 1, side.token_ids[place]] for place, counts in enumerate(side.loss_mask) if counts
        ))  # fmt: skip
    return found


@pytest.mark.usefixtures("float64_norms")
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "kto", "reward"])
@pytest.mark.parametrize("budget", [60, 1000])
def test_a_step_has_the_gradient_of_the_loss_itself(task: Task, loss: Any, budget: int) -> None:
    """Against the loss of whole conversations through transformers' model, differentiated in one piece."""
    scores = loss == "reward"
    config = PreferConfig(loss=loss)
    rows = _rows(task, loss)[:4]
    if loss in ("sigmoid", "ipo"):  # what the user says within an answer is neither counted nor trained
        said = [("assistant", "AB"), ("user", "more"), ("assistant", "ABAB")]
        rows[1]["chosen"] = [{"role": role, "content": text} for role, text in said]
    dataset = PreferenceDataset(
        rows, load_tokenizer(ModelConfig(path=str(task.model))), config.data, loss=loss
    )
    examples = list(dataset)
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    extra = {"num_labels": 1, "pad_token_id": 0} if scores else {}
    module = kind.from_pretrained(task.model, dtype=torch.float64, **extra)
    if scores:
        torch.nn.init.zeros_(module.score.weight)
    numbers = torch.stack([torch.stack(numbers_of(module, one, scores=scores)) for one in examples])
    reference = (
        torch.zeros(4, 2).double() if scores else numbers.detach() + torch.linspace(-1, 1, 8).reshape(4, 2)
    )
    lengths = torch.tensor([[sum(side.loss_mask) for side in one.pair] for one in examples]).double()
    good = torch.tensor([one.is_good for one in examples])
    at = Batch(
        numbers=numbers, reference=reference, lengths=lengths, margins=torch.zeros(4).double(), is_good=good
    )
    weighed = weigh(config, at)
    _plain(config, numbers, reference, lengths, good).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])

    worker = PreferenceWorker(
        ModelConfig(path=str(task.model), dtype="float64"), EngineConfig(max_tokens_per_device=budget),
        OptimizerConfig(lr=1e-3, max_grad_norm=1e9), TrainingInit(device="cpu", num_updates=1), scores=scores,
    )  # fmt: skip
    batch = preference_batch(examples)
    seen = worker.compute_numbers(batch).tensors()["numbers"].reshape(4, 2)
    torch.testing.assert_close(seen, numbers.detach(), rtol=1e-9, atol=1e-9)
    sides = 1 if loss == "kto" else 2  # answers to other prompts are not trained
    weights = DataProto.from_dict({"weights": weighed.weights[:, :sides].flatten()})
    update = worker.update(preference_batch(examples, sides).union(weights))
    assert metric_values(update.metrics)["train/grad_norm"] == pytest.approx(float(norm), rel=1e-8)
    assert float(norm) > 1e-4


def _plain(config: PreferConfig, numbers: Any, reference: Any, lengths: Any, good: Any) -> torch.Tensor:
    ratios = numbers - reference
    if config.loss == "reward":
        return torch.log1p(torch.exp(numbers[:, 1] - numbers[:, 0])).mean()
    if config.loss == "ipo":
        means = ratios / lengths
        return ((means[:, 0] - means[:, 1] - 1 / (2 * config.beta)) ** 2).mean()
    if config.loss == "kto":
        distance = max(0.0, float(ratios[:, 1].detach().mean()))
        signs = torch.where(good, 1.0, -1.0).double()
        return (1 - torch.sigmoid(signs * config.beta * (ratios[:, 0] - distance))).mean()
    return torch.log1p(torch.exp(-config.beta * (ratios[:, 0] - ratios[:, 1]))).mean()


def _rows(task: Task, loss: str) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (task.rated if loss == "kto" else task.pairs).read_text().splitlines()
    ]


@pytest.mark.parametrize("loss", ["sigmoid", pytest.param("kto", marks=pytest.mark.slow), "reward"])
def test_a_run_learns_and_a_resume_is_a_continuation(
    task: Task, loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = task.config(loss)
    whole = train(tmp_path / "whole", config)
    lines = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    first, last = lines[0], lines[-1]
    assert last["val/prefer/loss"] < first["val/prefer/loss"] - 0.05
    assert whole.val_loss == last["val/prefer/loss"]
    if loss == "sigmoid":
        kept = load_file(tmp_path / "whole" / "reference.safetensors")
        assert first["val/prefer/logps/chosen"] == pytest.approx(float(kept["val"][:, 0].mean()), abs=1e-5)
        for name, line in (("val/prefer/loss", first), ("prefer/loss", lines[1])):  # of rows in a drawn order
            assert line[name] == pytest.approx(math.log(2), abs=1e-6)
    if loss != "kto":
        assert last["val/prefer/rewards/accuracies"] == 1.0
    else:  # each of its kind of all held-out answers, not of batches
        gap = last["val/prefer/rewards/chosen"] - last["val/prefer/rewards/rejected"]
        assert last["val/prefer/rewards/margins"] == pytest.approx(gap)
    step = PreferenceTrainer._step

    def stopped(self: PreferenceTrainer, number: int, stages: Stages) -> dict[str, float]:
        if number == 4:
            raise InterruptedError
        return step(self, number, stages)

    with monkeypatch.context() as patch:
        patch.setattr(PreferenceTrainer, "_step", stopped)
        with pytest.raises(InterruptedError):
            train(tmp_path / "cut", config)
    resume(tmp_path / "cut")
    assert [one.chain for one in chain_of(tmp_path / "cut")] == [
        one.chain for one in chain_of(tmp_path / "whole")
    ]


def test_the_reward_model_of_a_run_scores_as_transformers_and_as_the_role_do(
    task: Task, tmp_path: Path
) -> None:
    result = train(tmp_path / "run", task.config("reward"))
    assert (result.run / "reference.safetensors").exists() is False
    dataset = PreferenceDataset(
        _rows(task, "reward"),
        load_tokenizer(ModelConfig(path=str(result.model))),
        PreferConfig().data,
        loss="reward",
    )
    module = AutoModelForSequenceClassification.from_pretrained(result.model, dtype=torch.float32)
    ours = RewardModelWorker(RewardModelConfig(path=str(result.model), dtype="float32"), device="cpu")
    for row, example in list(zip(_rows(task, "reward"), dataset, strict=True))[:6]:
        expected = [float(one.detach()) for one in numbers_of(module, example, scores=True)]
        asked = DataProto.from_dict({}, non_tensors={
            "raw_prompt": [[{"role": "user", "content": row["prompt"]}]] * 2,
            "response_text": [row["chosen"], row["rejected"]],
        })  # fmt: skip
        found = ours.compute_rm_score(asked).tensors()["rm_scores"].tolist()
        assert found == pytest.approx(expected, abs=1e-5)
        assert expected[0] > expected[1]


def with_padding(model: Path, folder: Path, *, tokenizer_pad: str, config_pad: int | None) -> Path:
    """The model with another padding token in its tokenizer, and in its config.json."""
    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer_pad
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["pad_token_id"] = config_pad
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("rank", [0, 2])
def test_transformers_scores_several_conversations_of_a_reward_model_at_once(
    task: Task, tmp_path: Path, rank: int
) -> None:
    """The starting model's config.json names no padding token, as those of many families do not."""
    start = with_padding(task.model, tmp_path / "start", tokenizer_pad=PAD, config_pad=None)
    more = ["prefer.max_steps=2", f"model.lora.rank={rank}"]
    result = train(tmp_path / "run", task.config("reward", f"model.path='{start}'", *more))
    asked = [json.loads(line) for line in task.pairs.read_text().splitlines()][:4]
    expected = role_scores(result.model, asked)
    assert cli("export", result.run, "--out", tmp_path / "exported").code == 0
    for folder in (result.model, tmp_path / "exported"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        module = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        texts = [tokenizer.apply_chat_template(conversation(row), tokenize=False) for row in asked]
        assert len({len(text) for text in texts}) > 1
        batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        assert module(**batch).logits[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_reward_model_is_never_padded_with_the_token_that_it_scores(
    task: Task, tmp_path: Path, rank: int
) -> None:
    """Here tokenizer and config.json of the starting model pad with the end of a turn."""
    ends = AutoTokenizer.from_pretrained(task.model).eos_token_id
    start = with_padding(task.model, tmp_path / "start", tokenizer_pad=END_OF_TURN, config_pad=ends)
    more = ["prefer.max_steps=2", f"model.lora.rank={rank}"]
    result = train(tmp_path / "run", task.config("reward", f"model.path='{start}'", *more))
    row = json.loads(task.pairs.read_text().splitlines()[0])
    (expected,) = role_scores(result.model, [row])
    assert cli("export", result.run, "--out", tmp_path / "exported").code == 0
    for folder in (result.model, tmp_path / "exported"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        module = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        assert module.config.pad_token_id is None
        ids = tokenizer.apply_chat_template(conversation(row), return_dict=True, return_tensors="pt")
        assert float(module(**ids).logits.detach()[0, 0]) == pytest.approx(expected, abs=1e-5)


def conversation(row: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]


def role_scores(folder: Path, rows: list[dict[str, Any]]) -> list[float]:
    """Scores of the better answers in a run."""
    worker = RewardModelWorker(RewardModelConfig(path=str(folder), dtype="float32"), device="cpu")
    asked = DataProto.from_dict({}, non_tensors={
        "raw_prompt": [conversation(row)[:1] for row in rows],
        "response_text": [row["chosen"] for row in rows],
    })  # fmt: skip
    return list(worker.compute_rm_score(asked).tensors()["rm_scores"].tolist())


def test_what_the_starting_model_said_is_kept_and_missed(task: Task, tmp_path: Path) -> None:
    train(tmp_path / "run", task.config("sigmoid", "prefer.max_steps=2"))
    kept = load_file(tmp_path / "run" / "reference.safetensors")
    assert {name: tuple(found.shape) for name, found in kept.items()} == {"train": (24, 2), "val": (24, 2)}
    (tmp_path / "run" / "reference.safetensors").unlink()
    with pytest.raises(ValueError, match="reference.safetensors is gone"):
        resume(tmp_path / "run", "prefer.max_steps=4")


def test_what_the_starting_model_said_of_other_rows_is_not_used(task: Task, tmp_path: Path) -> None:
    train(tmp_path / "run", task.config("sigmoid", "prefer.max_steps=2"))
    path = tmp_path / "run" / "reference.safetensors"
    save_file(load_file(path), path, metadata={"rows": "of others"})  # as many rows, with other tokens
    with pytest.raises(ValueError, match="is not about the rows of this run, whose tokens have changed"):
        resume(tmp_path / "run", "prefer.max_steps=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "axis"),
    [
        *((loss, f"{axis}=2") for loss in ("sigmoid", "reward") for axis in AXES),
        ("sigmoid", "expert_parallel=2"),
        ("sigmoid", "megatron context_parallel=2"),
        ("reward", "megatron pipeline_parallel=2"),
    ],
)
def test_two_ranks_learn_what_one_does(task: Task, loss: str, axis: str, tmp_path: Path) -> None:
    ranks = ["resources.runtime=ray", "resources.ranks=2", "resources.cpus_per_rank=0.1"]
    model = task.model
    if axis == "expert_parallel=2":
        model = make_expert_model(tmp_path / "experts", task.model)
    kind, _, axis = axis.rpartition(" ")
    if kind:
        if not megatron_in_workers.IS_INSTALLED:
            pytest.skip("megatron-core is not installed")
        ranks += ["model.external_lib=references.megatron_in_workers"]
        ranks += [f"prefer.engine.{setting}" for setting in megatron_in_workers.SETTINGS]
    common = [f"model.path='{model}'"]
    one = train(tmp_path / "one", task.config(loss, *common))
    cut = ["prefer.engine.max_tokens_per_device=80", f"prefer.engine.{axis}"]
    two = train(tmp_path / "two", task.config(loss, *common, *ranks, *cut))
    for mine, other in zip(
        *(read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "one")), strict=True
    ):
        for name in ("prefer/loss", "train/grad_norm", "val/prefer/loss"):
            if name in other:
                assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), (name, mine["step"])
    weights = [load_file(run.model / "model.safetensors") for run in (one, two)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=2e-3)
