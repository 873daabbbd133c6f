"""Runs that compare the single answers of episodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import Project, check_records, train_in

from references import advantages as reference
from strop.config.errors import ConfigError
from strop.protocol import DataProto, columns
from strop.run import RunFolder

WORLD = '''
class Parity:
    """A state of two values: whether the letters said so far are even; each answer is worth its first letter."""

    def reset(self, seed, row):
        self.said, self.turns = 0, 0
        return ""

    def step(self, action):
        self.said, self.turns = self.said + len(action), self.turns + 1
        reward = ord((action or " ")[0]) % 8 / 10
        return "go on", reward, self.turns == 3, {"acc": reward > 0.5}

    def anchor_state(self):
        return "even" if self.said % 2 == 0 else "odd"
'''
SETTINGS = [
    "agent.default_agent=env_agent", "agent.credit=turn", "data.max_response_tokens=40", "data.val_files=[]",
    "algorithm=gigpo", "trainer.max_steps=2",
    f"rollout.stop_token_ids={list(range(20, 50))}",  # a random model hardly ever ends its turn
]  # fmt: skip


def world(folder: Path) -> list[str]:
    (folder / "world.py").write_text(WORLD)
    return [f"agent.environment.name='{folder / 'world.py'}:Parity'"]


def share_of_common_beginnings(rows: DataProto | None) -> float:
    """Of the tokens that a model reads of rows, the share that other rows have too, behind the same ones."""
    assert rows is not None
    prompts, responses = (columns.rows(rows.tensors()[name]) for name in ("prompts", "responses"))
    read = [(*p.tolist(), *r.tolist()[:-1]) for p, r in zip(prompts, responses, strict=True)]
    beginnings = {row[:length] for row in read for length in range(1, len(row) + 1)}
    return 1 - len(beginnings) / sum(map(len, read))


@pytest.mark.timeout(120)
def test_a_run_trains_on_the_advantages_that_the_reference_gives_its_samples(
    project: Project, tmp_path: Path
) -> None:
    done = train_in(tmp_path / "run", project.config(*SETTINGS, *world(tmp_path)))
    check_records(done.folder, num_steps=2)
    assert all(numbers["actor/grad_norm"] > 0 for numbers in done.steps)
    # Every answer is a row whose prompt is all that was before it, which is computed once.
    for numbers, record in zip(done.steps, done.records, strict=True):
        assert numbers["perf/shared_tokens/actor"] == pytest.approx(
            share_of_common_beginnings(record.fetched)
        )
        assert numbers["perf/shared_tokens/actor"] > 0.5
    # The first answers to a prompt are all in one state, so at least a third of the answers share theirs.
    assert all(1 / 3 < numbers["training/steps_in_shared_states"] <= 1 for numbers in done.steps)
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        samples = run.samples.read(1)
    assert len(samples) == 16
    turns = [(row, one) for row in samples for one in [*(row["earlier_sequences"] or ()), row]]
    assert {one["anchor"] for _, one in turns} == {"even", "odd"}
    assert all(
        one["anchor"] == "even" for row in samples for one in [*(row["earlier_sequences"] or ()), row][:1]
    )
    names = sorted({row["uid"] for row, _ in turns})
    expected = reference.gigpo(
        [one["turn_rewards"][0][1] for _, one in turns],
        [row["sample_index"] for row, _ in turns],
        [number for row in samples for number in range(1 + len(row["earlier_sequences"] or ()))],
        [["even", "odd"].index(one["anchor"]) for _, one in turns],
        [names.index(row["uid"]) for row, _ in turns],
        [[1]] * len(turns), True, 0.95, 1.0,
    )  # fmt: skip
    batch = done.records[0].fetched
    assert batch is not None
    found = torch.stack([row[0] for row in columns.rows(batch.tensors()["advantages"])])
    # In the order of the samples: rows of an episode stand together.
    torch.testing.assert_close(found.double(), torch.tensor(expected).double()[:, 0], rtol=1e-3, atol=1e-4)
    # The same samples once more, as they were recorded.
    again = train_in(
        tmp_path / "again",
        project.config(*SETTINGS, *world(tmp_path), f"trainer.skip_rollout='{tmp_path / 'run'}'"),
    )
    assert [one.stages["advantages"] for one in again.chain] == [
        one.stages["advantages"] for one in done.chain
    ]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ["agent.credit=trajectory"],
            "compares the single answers of episodes, so each must be a sample of its own",
        ),
        (["algorithm=dr_grpo", "algorithm.anchor_similarity=0.9"], "anchor_similarity is 0.9, but"),
        (["algorithm.anchor_similarity=0"], "algorithm.anchor_similarity"),
    ],
)
def test_settings_that_do_not_go_with_answers_compared_are_refused(
    project: Project, tmp_path: Path, settings: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        project.config(*SETTINGS, *world(tmp_path), *settings)
