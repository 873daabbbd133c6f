"""The policy learns on several ranks: PPO with a critic, GRPO with KL in the reward, a reward model's word alone, and
with its matrices over two of four ranks."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from learning_task import ALPHABET, LearningTask
from tiny_runs import check_records, train_in
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from strop.data.tiny_model import CHARACTERS
from strop.observability.trackers.setup import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RANKS = ["resources.runtime=ray", "resources.ranks=2", "resources.cpus_per_rank=0.5"]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> LearningTask:
    return LearningTask(tmp_path_factory.mktemp("learning-on-ranks"))


def check_learned(folder: Path, task: LearningTask, *overrides: str, rise: float = 0.2) -> None:
    """The pass rate rises by `rise` and more."""
    done = train_in(folder, task.config(None, *RANKS, *overrides))
    before, after = done.result.pass_rate_start, done.result.pass_rate_final
    assert before is not None
    assert after is not None
    assert 0.15 < before < 0.7
    assert after >= before + rise, (before, after)
    check_records(folder, num_steps=40)


def test_ppo_with_a_critic_learns(task: LearningTask, tmp_path: Path) -> None:
    check_learned(tmp_path / "run", task, "algorithm=ppo", "trainer.critic_warmup=2")


def test_grpo_with_kl_in_the_reward_learns(task: LearningTask, tmp_path: Path) -> None:
    check_learned(
        tmp_path / "run", task, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.01", "resources.apart={rollout: 1}",
    )  # fmt: skip


def test_with_matrices_over_two_of_four_ranks_it_learns(task: LearningTask, tmp_path: Path) -> None:
    check_learned(
        tmp_path / "run",
        task,
        "resources.ranks=4",
        "resources.cpus_per_rank=0.25",
        "actor.engine.tensor_parallel=2",
    )


def test_a_reward_model_teaches_without_the_reward_function(task: LearningTask, tmp_path: Path) -> None:
    """The judge's word rises by as much as other rewards do; the pass rate by less where the judge errs."""
    judge = train_judge(tmp_path / "judge", task.sft.model)
    check_learned(
        tmp_path / "run", task, f"reward_model.path='{judge}'", "reward.weight=0",
        "algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.05", rise=0.1,
    )  # fmt: skip
    steps = [
        row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward_model/score/mean" in row
    ]
    words = [row["reward_model/score/mean"] for row in steps]
    assert fmean(words[-5:]) >= fmean(words[:5]) + 0.2


def train_judge(folder: Path, policy: Path) -> Path:
    """A classifier that says which share of the letters stand where they should; plain transformers.

    It begins as the policy that it will judge, which knows the task half.
    """
    tokenizer = AutoTokenizer.from_pretrained(policy)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = random.Random(0)
    for step in range(3000):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (1 - step / 3000)
        loss = sum(judge_errors(model, tokenizer, generator))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    with torch.no_grad():
        left = sum(float(judge_errors(model, tokenizer, generator)[0]) for _ in range(10)) / 10
    assert left < 0.004, "the judge must know the task before it judges"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def judge_errors(model: Any, tokenizer: Any, generator: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squared errors on 64 conversations: of the scores, and of a lesson per letter (is it right?)."""
    texts, letters, shares = zip(*(example(generator, tokenizer) for _ in range(64)), strict=True)
    batch = tokenizer(list(texts), return_tensors="pt", padding=True, add_special_tokens=False)
    numbers = model.score(model.model(**batch).last_hidden_state)[..., 0]  # [64, tokens]
    targets = torch.full_like(numbers, torch.nan)
    ends = batch["attention_mask"].sum(1) - 1  # the token that ends the turn, where a reward model is read
    for row, (end, right) in enumerate(zip(ends.tolist(), letters, strict=True)):
        targets[row, end - len(right) : end] = torch.tensor(right)
    is_letter = ~targets.isnan()
    scores = numbers[torch.arange(len(ends)), ends]
    return (
        (scores - torch.tensor(shares)).square().mean(),
        (numbers - targets)[is_letter].square().mean(),
    )


def example(generator: random.Random, tokenizer: Any) -> tuple[str, list[float], float]:
    """A conversation with a right, an almost right or a wrong answer; which letters are right, and their share.

    Wrong ones are of every kind that a policy may come upon: letters of the word in other places, other letters,
    other characters, too many, too few.
    """
    word = "".join(generator.choice(ALPHABET) for _ in range(3))
    right = list(word[::-1])
    others = generator.choice([word, word, ALPHABET, CHARACTERS])
    answer = [c if generator.random() < 0.6 else generator.choice(others) for c in right]
    match generator.randrange(5):
        case 0:
            answer = answer[: generator.randrange(3)]
        case 1:
            answer += [generator.choice(others) for _ in range(generator.randint(1, 9))]
    is_right = [float(place < 3 and letter == right[place]) for place, letter in enumerate(answer)]
    messages = [
        {"role": "user", "content": f"reverse: {word}"},
        {"role": "assistant", "content": "".join(answer)},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return text, is_right, sum(is_right) / max(3, len(answer))
