"""`strop env check`: good environments pass, each kind of bad one is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.cli.main import main

WORLDS = '''
import random, time

class Good:
    def __init__(self, size=6):
        self.size = size
    def reset(self, seed, row):
        self.number = random.Random(seed).randint(1, self.size)
        return f"1 to {self.size}"
    def step(self, action):
        right = action == str(self.number)
        return "no", float(right), right, {"acc": right}
    def gold_action(self):
        return str(self.number)

class Unseeded(Good):
    def reset(self, seed, row):
        self.number = random.SystemRandom().randint(1, 10**9)
        return "?"

class Shared(Good):
    """Keeps the number where all episodes find it."""
    number = 0
    async def reset(self, seed, row):
        Shared.number = random.Random(seed).randint(1, 10**6)
        return "?"
    async def step(self, action):
        import asyncio
        await asyncio.sleep(0.001)
        return str(Shared.number), float(action == str(Shared.number)), action == str(Shared.number), {}
    async def gold_action(self):
        import asyncio
        await asyncio.sleep(0.001)
        return str(Shared.number)

class Generous(Good):
    def step(self, action):
        return "fine", float(bool(action.strip())) or float(action == str(self.number)), True, {}

class Fragile(Good):
    def step(self, action):
        return "no", float(int(action) == self.number), True, {}

class Injectable(Good):
    def step(self, action):
        right = action == str(self.number) or "reward" in action
        return "no", float(right), right, {}

class Unbegun(Good):
    def reset(self, seed, row):
        raise RuntimeError("no world")

class OfGymnasium:
    def reset(self, *, seed=None, options=None):
        self.number = random.Random(seed).randint(1, 10**6)
        return f"not {self.number}", {}
    def step(self, action):
        right = action == str(self.number)
        return "no", float(right), right, not right, {"acc": right}
    def gold_action(self):
        return str(self.number)

class Slow(Good):
    def step(self, action):
        time.sleep(5)

class Endless(Good):
    def step(self, action):
        return "no", float("inf"), True, {}
'''


@pytest.fixture
def worlds(tmp_path: Path) -> str:
    path = tmp_path / "worlds.py"
    path.write_text(WORLDS, encoding="utf-8")
    return str(path)


def test_a_certificate_that_cannot_be_written_is_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "check", f"{tmp_path}/none.py:Good", "--out", "/proc/strop/c.json"]) == 2
    assert "cannot write --out /proc/strop/c.json: No such file" in capsys.readouterr().err


def test_a_good_environment_gets_a_certificate(
    worlds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "certificate.json"
    assert main(["env", "check", f"{worlds}:Good", "size=4", "--out", str(out)]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["is_deterministic"]
    assert found["seeds_differ"]
    assert found["is_isolated"]
    assert found["kwargs"] == {"size": 4}
    assert found["reward_range"] == [0.0, 1.0]
    assert found["mean_scores"] == {"gold": 1.0, "empty": 0.0, "garbage": 0.0, "adversarial": 0.0}
    assert found["faults"] == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Unseeded", "the same seed does not give the same episode twice"),
        ("Shared", "episodes at the same time influence each other"),
        ("Generous", "player garbage is rewarded as well as the best one (1)"),
        ("Fragile", "player empty: environment"),
        ("Injectable", "is rewarded like the best player (1)"),
        ("Slow", "step took longer than 0.05 s"),
        ("Endless", "the reward is inf; it must be finite"),
    ],
)
def test_what_is_wrong_is_said(
    worlds: str, name: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    timeout = "0.05" if name == "Slow" else "20"
    seeds = "1" if name == "Slow" else "4"
    args = [
        "env",
        "check",
        f"{worlds}:{name}",
        "--json",
        "--timeout",
        timeout,
        "--seeds",
        seeds,
        "--max-turns",
        "3",
    ]
    assert main(args) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert any(sentence in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing"], "unknown environment 'nothing'; known: gymnasium"),
        (["{file}"], "name the class too"),
        (["{file}:Good", "size"], "write key=value"),
        (["{file}:Good", "colour=1"], "does not take the arguments"),
        (["{file}:Good", "--seeds", "0"], "use more than 0"),
    ],
)
def test_mistakes_are_one_sentence(
    worlds: str, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "check", *[word.replace("{file}", worlds) for word in words]]) == 2
    assert sentence in capsys.readouterr().err


def test_one_bug_is_one_fault_with_its_line(worlds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", f"{worlds}:Fragile", "--seeds", "3", "--json"]) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    line = 1 + WORLDS.splitlines().index('        return "no", float(int(action) == self.number), True, {}')
    failed = [fault for fault in faults if f"at worlds.py:{line}" in fault]
    assert len(failed) == 1
    assert "more episodes)" in failed[0]
    assert len(failed[0]) < 400


def test_nothing_is_said_of_seeds_where_no_episode_was_played(
    worlds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "check", f"{worlds}:Unbegun", "--seeds", "2", "--json"]) == 1
    certificate = json.loads(capsys.readouterr().out)
    assert certificate["episodes"] == 0
    assert not [note for note in certificate["notes"] if "seed" in note]


def test_a_class_in_the_form_of_gymnasium_has_no_fault(
    worlds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "check", f"{worlds}:OfGymnasium", "--seeds", "2", "--json"]) == 0
    certificate = json.loads(capsys.readouterr().out)
    assert (certificate["faults"], certificate["mean_scores"]["gold"]) == ([], 1.0)


def test_rows_of_the_data_reach_the_environment(worlds: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"prompt": "x", "extra_info": {"env_kwargs": {"size": 1}}}) + "\n", encoding="utf-8"
    )
    out = tmp_path / "certificate.json"
    assert main(["env", "check", f"{worlds}:Good", "--rows", str(rows), "--out", str(out)]) == 0
    assert not json.loads(out.read_text(encoding="utf-8"))["seeds_differ"], "there is one number only"
