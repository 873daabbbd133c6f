"""A run whose reward compares the answers to a prompt."""

from __future__ import annotations

from pathlib import Path

from tiny_runs import Project, train_in

from strop.rewards.rescoring import rescore, samples_of_run
from strop.run import RunFolder

SOURCE = '''
def longest(completions, **columns):
    """1 for the longest answers of the group."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(len(text) == max(map(len, texts))) for text in texts]
'''


def test_a_reward_of_trl_compares_the_answers_of_each_group(project: Project, tmp_path: Path) -> None:
    """In each group of 4 the longest answers have 1 and no other; scored again from the run folder, the same."""
    (tmp_path / "mine.py").write_text(SOURCE)
    config = project.config(
        f"reward.path='{tmp_path / 'mine.py'}'", "reward.name=longest", "trainer.max_steps=2"
    )
    done = train_in(tmp_path / "run", config)
    with RunFolder.open(done.folder, read_only=True) as run:
        rows = [row for step in (1, 2) for row in run.samples.read(step)]
        groups: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            groups.setdefault(row["uid"], []).append((len(row["response"]), row["score"]))
        again = rescore(samples_of_run(run, config.data, split="train", steps=[1, 2]), config.reward)
    assert [len(group) for group in groups.values()] == [4] * 8
    assert any(len({length for length, _ in group}) > 1 for group in groups.values()), (
        "not all are of one length"
    )
    for group in groups.values():
        longest = max(length for length, _ in group)
        assert [score for _, score in group] == [float(length == longest) for length, _ in group]
    assert not any(one.has_changed for one in again)
    assert len(again) == 32


STANDARD = """
import statistics

def standard(completions, **columns):
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    sizes = [float(len(text)) for text in texts]
    spread = statistics.stdev(sizes)  # needs two
    return [(size - statistics.mean(sizes)) / (spread or 1.0) for size in sizes]
"""


def test_a_reward_that_needs_several_answers_trains_and_validates(project: Project, tmp_path: Path) -> None:
    """A validation with one answer to a prompt is told before the first step; with two it has scores."""
    (tmp_path / "mine.py").write_text(STANDARD)
    mine = [f"reward.path='{tmp_path / 'mine.py'}'", "reward.name=standard", "trainer.max_steps=1"]
    for size in (1, 2):
        config = project.config(*mine, f"eval.samples_per_prompt={size}", f"eval.temperature={size - 1}")
        done = train_in(tmp_path / f"run{size}", config)
        told = [line for line in done.said if "set eval.samples_per_prompt=4" in line]
        assert len(told) == (1 if size == 1 else 0)
        with RunFolder.open(done.folder, read_only=True) as run:
            assert all(row["score"] is not None for row in run.samples.read(1))
