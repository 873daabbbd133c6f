"""strop.Pieces: a loop of one's own does what the trainer does, and says what it cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strop import Pieces, train
from strop.cli.quickstart.task import TaskFiles
from strop.run import RunFolder

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """By the first letter."""
    return ord((solution_str or " ")[0]) % 8 / 10
'''


@pytest.fixture
def settings(tiny_model: Path, tiny_task: TaskFiles, tmp_path: Path) -> dict[str, Any]:
    """Of runs of two steps."""
    (tmp_path / "reward.py").write_text(REWARD)
    return {
        "model.path": str(tiny_model),
        "data.train_files": [str(tiny_task.train)],
        "data.val_files": [str(tiny_task.val)],
        "data.prompts_per_step": 4,
        "data.max_prompt_tokens": 24,
        "data.max_response_tokens": 5,
        "rollout.samples_per_prompt": 4,
        "reward.path": str(tmp_path / "reward.py"),
        "reward.num_workers": 1,
        "actor.optim.lr": 1e-3,
        "actor.samples_per_update": 8,
        "trainer.max_steps": 2,
        "trainer.trackers": ["jsonl"],
        "trainer.preflight": False,
        "eval.before_train": False,
        "eval.every": 0,
        "resources.num_threads": 1,
    }


def two_steps(pieces: Pieces) -> list[str]:
    """The trainer's order of things; the digest of the weights after each step."""
    digests = []
    for _ in range(2):
        samples = pieces.play(pieces.prompts(4), samples_per_prompt=4)
        samples = pieces.with_columns(samples, "old_log_probs", "advantages")
        for part in samples.split(8):
            assert len(part) == 8
            metrics = pieces.update(part)
            assert metrics["actor/grad_norm"] > 0
        pieces.update_weights()
        digests.append(pieces.roles.checksums()["actor"])
    return digests


def test_a_loop_of_pieces_takes_the_steps_of_the_trainer_to_the_bit(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    train(settings=settings, out=tmp_path / "run")
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        expected = [one.stages["weights"] for one in run.fingerprints.read()]
    with Pieces(settings=settings) as pieces:
        assert pieces.num_steps == 2
        assert two_steps(pieces) == expected
        assert pieces.version == 2
        saved = pieces.save(tmp_path / "saved")
    assert (saved / "model.safetensors").read_bytes() == (
        tmp_path / "run" / "model" / "model.safetensors"
    ).read_bytes()
    assert pieces.tokenizer.vocab_size > 0
    assert (saved / "tokenizer.json").is_file()


def test_advantages_of_the_caller_stand_at_every_token_of_their_sample(settings: dict[str, Any]) -> None:
    with Pieces(settings=settings) as pieces:
        prompts = pieces.prompts(3)
        samples = pieces.play(prompts, samples_per_prompt=2)
        assert samples.groups() == [[0, 1], [2, 3], [4, 5]]
        assert [report.uid for report in samples.reports[::2]] == [prompt.uid for prompt in prompts]
        texts = samples.batch.rows.get().tensors()["responses"].unbind()
        letters = [pieces.tokenizer.decode(text, skip_special_tokens=True)[:1] or " " for text in texts]
        assert samples.rewards.tolist() == pytest.approx([ord(letter) % 8 / 10 for letter in letters])
        given = samples.with_advantages(torch.arange(6.0))
        column = given.batch.rows.get().tensors()["advantages"].unbind()
        assert [row.tolist() for row in column] == [[float(i)] * len(texts[i]) for i in range(6)]
        with pytest.raises(ValueError, match=r"shape \[5\] .* one finite number for each of 6 samples"):
            samples.with_advantages(torch.zeros(5))
        with pytest.raises(ValueError, match="1 numbers that are not finite"):
            samples.with_advantages(torch.tensor([0, 1, 2, 3, 4, float("nan")]))
        with pytest.raises(ValueError, match="no role makes a column 'advantage'; there are .*advantages"):
            pieces.with_columns(samples, "advantage")
        with pytest.raises(ValueError, match=r"needs the columns advantages: make them with with_columns\("):
            pieces.update(samples)
        with pytest.raises(ValueError, match="adv_estimator=grpo has no critic"):
            pieces.update(given, role="critic")
        validation = pieces.validate()
        assert validation.pass_rate is None, "rewards between 0 and 1 say nothing of passing"
        assert 0 <= validation.mean_reward <= 1


def test_a_loop_with_a_critic_and_a_reference(settings: dict[str, Any]) -> None:
    ppo = {"algorithm.adv_estimator": "gae", "algorithm.use_kl_loss": True}
    with Pieces(settings={**settings, **ppo}) as pieces:
        samples = pieces.with_columns(pieces.play(pieces.prompts(2), 2), "values", "advantages")
        with pytest.raises(ValueError, match=r"ref_log_prob \(algorithm.use_kl_loss\)"):
            pieces.update(samples)
        samples = pieces.with_columns(samples, "ref_log_prob")
        assert pieces.update(samples, role="critic")["critic/grad_norm"] > 0
        found = pieces.update(samples)
        assert found["actor/grad_norm"] > 0
        assert abs(found["actor/kl_loss"]) < 1e-5, "the policy is still the reference"


@pytest.mark.dist
def test_the_same_loop_runs_on_two_ranks(settings: dict[str, Any]) -> None:
    with Pieces(settings=settings) as pieces:
        samples = pieces.play(pieces.prompts(4), samples_per_prompt=4)
        expected = samples.rewards.tolist()
    on_ray = {"resources.runtime": "ray", "resources.ranks": 2, "resources.cpus_per_rank": 0.25}
    with Pieces(settings={**settings, **on_ray}) as pieces:
        assert pieces.roles.actor.world_size == 2
        samples = pieces.play(pieces.prompts(4), samples_per_prompt=4)
        assert samples.rewards.tolist() == expected
        given = samples.with_advantages(samples.rewards - samples.rewards.mean())
        before = pieces.roles.checksums()["actor"]
        assert pieces.update(given)["actor/grad_norm"] > 0
        pieces.update_weights()
        assert pieces.roles.checksums()["actor"] != before
        assert len(pieces.play(pieces.prompts(2), samples_per_prompt=2)) == 4
