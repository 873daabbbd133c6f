"""The policy learns on two ranks: PPO with a critic, GRPO with KL in the reward, and a reward model's word alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from learning_task import ALPHABET, LearningTask
from tiny_runs import check_records, train_in
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RANKS = ["resources.runtime=ray", "resources.ranks=2", "resources.cpus_per_rank=0.5"]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> LearningTask:
    return LearningTask(tmp_path_factory.mktemp("learning-on-ranks"))


def check_learned(folder: Path, task: LearningTask, *overrides: str) -> None:
    """The pass rate rises by twenty points and more."""
    done = train_in(folder, task.config(None, *RANKS, *overrides))
    before, after = done.result.pass_rate_start, done.result.pass_rate_final
    assert before is not None
    assert after is not None
    assert 0.15 < before < 0.7
    assert after >= before + 0.2, (before, after)
    check_records(folder, num_steps=40)


def test_ppo_with_a_critic_learns(task: LearningTask, tmp_path: Path) -> None:
    check_learned(tmp_path / "run", task, "algorithm=ppo", "trainer.critic_warmup=2")


def test_grpo_with_kl_in_the_reward_learns(task: LearningTask, tmp_path: Path) -> None:
    check_learned(
        tmp_path / "run", task, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.01", "resources.apart={rollout: 1}",
    )  # fmt: skip


def test_a_reward_model_teaches_without_the_reward_function(task: LearningTask, tmp_path: Path) -> None:
    judge = train_judge(tmp_path / "judge", task.folder / "model")
    check_learned(tmp_path / "run", task, f"reward_model.path='{judge}'", "reward.weight=0")


def train_judge(folder: Path, policy: Path) -> Path:
    """A classifier that says which share of the letters stand where they should; a minute of plain transformers."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=24, intermediate_size=256, max_position_embeddings=64, num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = random.Random(0)
    for step in range(500):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (1 - step / 500)
        texts, targets = zip(*(example(generator, tokenizer) for _ in range(64)), strict=True)
        batch = tokenizer(list(texts), return_tensors="pt", padding=True, add_special_tokens=False)
        scores = model(**batch).logits[:, 0]
        loss = torch.nn.functional.mse_loss(scores, torch.tensor(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss) < 0.05, "the judge must know the task before it judges"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def example(generator: random.Random, tokenizer: object) -> tuple[str, float]:
    """A conversation with a right, an almost right or a wrong answer, and the share of right letters."""
    word = "".join(generator.choice(ALPHABET) for _ in range(3))
    right = list(word[::-1])
    answer = [c if generator.random() < 0.6 else generator.choice(ALPHABET) for c in right]
    answer = answer[: generator.choice([3, 3, 3, 2])] + [generator.choice(ALPHABET)] * (
        generator.random() < 0.1
    )
    share = sum(a == b for a, b in zip(answer, right, strict=False)) / max(3, len(answer))
    messages = [
        {"role": "user", "content": f"reverse: {word}"},
        {"role": "assistant", "content": "".join(answer)},
    ]
    return tokenizer.apply_chat_template(messages, tokenize=False), share  # type: ignore[attr-defined]
