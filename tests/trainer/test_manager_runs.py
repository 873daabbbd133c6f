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


PARTLY = """
class PerToken:
    def __init__(self, tokenizer, **_):
        pass

    def __call__(self, data):
        rewards = (data.batch["responses"] % 8) / 8.0
        has_part = int(data.batch["responses"].sum()) % 3 > 0
        return {"reward_tensor": rewards, "reward_extra_info": {"fmt": [1.0]} if has_part else {}}
"""


@pytest.mark.slow
def test_a_sample_without_a_part_is_left_out_also_with_rewards_of_tokens(
    project: Project, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(PARTLY)
    config = project.config(
        f"reward.path='{tmp_path / 'mine.py'}'", "reward.manager=PerToken", "reward.max_failed_share=0.9",
        "trainer.max_steps=1", "data.val_files=[]", "algorithm.adv_estimator=gdpo", "algorithm.reward_keys=[score,fmt]",
    )  # fmt: skip
    (record,) = train_in(tmp_path / "run", config).records
    kinds = [report.outcome.kind for report in record.reports if report.outcome is not None]
    assert set(kinds) == {"score", "error"}
    assert all(
        (report.reward() is None) == (kind == "error")
        for report, kind in zip(record.reports, kinds, strict=True)
    )
