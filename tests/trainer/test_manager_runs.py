"""A run whose reward manager gives a reward to every token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import Project, train_in

from strop.protocol import columns
from strop.run import RunFolder

SOURCE = """
class PerToken:
    def __init__(self, tokenizer, **_):
        pass

    def __call__(self, data):
        return (data.batch["responses"] % 8) / 8.0
"""


def test_rewards_of_tokens_are_trained_where_they_are(project: Project, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    config = project.config(
        f"reward.path='{tmp_path / 'mine.py'}'", "reward.manager=PerToken", "reward.weight=2.0", "trainer.max_steps=1",
        "data.val_files=[]", "algorithm.adv_estimator=reinforce_plus_plus",
    )  # fmt: skip
    done = train_in(tmp_path / "run", config)
    (record,) = done.records
    assert record.fetched is not None
    tensors = record.fetched.tensors()
    rows = {name: columns.rows(tensors[name]) for name in ("responses", "token_level_scores", "returns")}
    assert any(len(row.unique()) > 2 for row in rows["token_level_scores"])
    for ids, scores, returns in zip(*rows.values(), strict=True):
        expected = (ids % 8).double() / 4  # each eighth, twice
        torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(returns.double(), expected.flip(0).cumsum(0).flip(0), rtol=0, atol=1e-5)
    with RunFolder.open(done.folder, read_only=True) as run:
        samples = run.samples.read(1)
    for sample in samples:
        assert sample["score"] == pytest.approx(sum(token % 8 for token in sample["response_ids"]) / 8)
