"""Reward managers of verl, both generations, in worker processes."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_cases import make_prompt, make_trajectory, write_reward

from strop.data.tiny_model import make_tiny_model
from strop.rewards import Outcome, RewardConfig, RewardError, RewardPool
from strop.rewards import verl_managers as managers
from strop.rewards.functions import BadReturnError, LoadError, RewardFunction
from strop.rewards.wire import call_of

pytestmark = pytest.mark.timeout(120)

MANAGERS = """
import torch
from strop.rewards.managers import RewardManagerBase, register

def compute_score(solution_str, ground_truth, **_):
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth}

@register("named")
class Single(RewardManagerBase):
    async def run_single(self, data):
        row = data[0]
        response = row.batch["responses"]
        valid = row.batch["attention_mask"][-len(response):].sum()
        text = await self.loop.run_in_executor(None, lambda: self.tokenizer.decode(response[:valid]))
        if text == "boom":
            raise RuntimeError("boom")
        truth = row.non_tensor_batch["reward_model"]["ground_truth"]
        graded = self.compute_score(solution_str=text, ground_truth=truth)
        turns = row.non_tensor_batch["__num_turns__"]
        extra = {"acc": graded["acc"], "turns": turns, "source": row.non_tensor_batch["data_source"]}
        return {"reward_score": graded["score"] + self.config.bonus, "reward_extra_info": extra}

class Older:
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", bonus=0.0):
        self.tokenizer, self.compute_score, self.key, self.bonus = tokenizer, compute_score, reward_fn_key, bonus

    def __call__(self, data, return_dict=False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i in range(len(data)):
            row = data[i]
            text = self.tokenizer.decode(row.batch["responses"])
            truth = row.non_tensor_batch["reward_model"]["ground_truth"]
            score = self.compute_score(solution_str=text, ground_truth=truth)
            rewards[i, -1] = score["score"] + self.bonus
        return {"reward_tensor": rewards, "reward_extra_info": {"acc": [True]}} if return_dict else rewards

class PerToken:
    def __init__(self, tokenizer, **_):
        pass

    def __call__(self, data, return_dict=False):
        length = data.batch["responses"].shape[1]
        rewards = torch.linspace(1.0, 2.0, length)[None] * data.batch["response_mask"]
        return {"reward_tensor": rewards} if return_dict else rewards

class Wrong:
    pass
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, seed=0)
    return str(folder)


def run(folder: Path, tokenizer: str, texts: list[str], **fields: Any) -> list[Outcome]:
    fields = {"num_workers": 1, "timeout_s": 20.0, "kwargs": {"bonus": 0.25}, **fields}
    config = RewardConfig(path=write_reward(folder, MANAGERS), **fields)
    prompt = replace(make_prompt(), columns={"level": 2})

    async def score() -> list[Outcome]:
        async with RewardPool(config, tokenizer=tokenizer) as pool:
            return await asyncio.gather(*(pool.score(prompt, make_trajectory(), text) for text in texts))

    return asyncio.run(score())


@pytest.mark.slow
def test_manager_scores_in_worker_processes(tmp_path: Path, tokenizer: str) -> None:
    right, wrong, broken = run(tmp_path, tokenizer, ["12", "3", "boom"], manager="named")
    assert (right.score, wrong.score) == (1.25, 0.25)
    assert right.parts == {"acc": True, "turns": 2, "source": "strop/exact"}
    assert broken.kind == "error"
    assert "named in my_reward.py raised RuntimeError: boom" in broken.error


@pytest.fixture
def load(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RewardFunction]:
    """Load a manager in this process, which has torch already."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(managers, "registered", {})

    def load_one(manager: str, **kwargs: Any) -> RewardFunction:
        setup = {
            "path": write_reward(tmp_path, MANAGERS), "source": MANAGERS, "name": "compute_score", "manager": manager,
            "tokenizer": tokenizer, "kwargs": kwargs,
        }  # fmt: skip
        return managers.load_manager(setup)

    return load_one


CALL = {
    "uid": "u", "data_source": "s", "solution_str": "12", "ground_truth": "12", "extra_info": {"num_turns": 4},
    "columns": {"level": 2}, "messages": [], "prompt_ids": [1, 2], "completion_ids": [],
    "response_mask": [],
}  # fmt: skip


def test_a_call_tells_sampled_tokens_from_those_of_tools() -> None:
    trajectory = make_trajectory().with_sampled([3, 4], [-1.0, -1.0], [0, 0]).with_given([5])
    trajectory = trajectory.with_sampled([6], [-1.0], [0])
    call = call_of(make_prompt(), trajectory, "text", wants_conversation=True)
    assert (call["completion_ids"], call["response_mask"]) == ([3, 4, 5, 6], [1, 1, 0, 1])


def test_manager_of_the_older_form(load: Callable[..., RewardFunction]) -> None:
    function = load("Older", bonus=0.25)
    part = function.read(function(CALL))
    assert (part.score, part.parts) == (1.25, {"acc": True})
    wrong = function.read(function({**CALL, "ground_truth": "13"}))
    assert wrong.score == 0.25


def test_rewards_of_tokens_stay_on_them_and_add_up_to_the_score(load: Callable[..., RewardFunction]) -> None:
    function = load("PerToken")
    part = function.read(function({**CALL, "completion_ids": [3, 4, 5], "response_mask": [1, 0, 1]}))
    assert part.score == 3.0
    assert list(part.token_rewards) == [(0, 1.0), (2, 2.0)]
    on_the_last = function.read(torch.tensor([[0.0, 0.0, 2.0]]))
    assert (on_the_last.score, list(on_the_last.token_rewards)) == (2.0, [])
    on_none = function.read(torch.zeros(1, 3))
    assert (on_none.score, list(on_none.token_rewards)) == (0.0, [])
    elsewhere = function.read(torch.tensor([[0.0, 2.0, 0.0]]))
    assert list(elsewhere.token_rewards) == [(1, 2.0)]


@pytest.mark.slow
def test_rewards_of_tokens_reach_the_pool(tmp_path: Path, tokenizer: str) -> None:
    config = RewardConfig(
        path=write_reward(tmp_path, MANAGERS), manager="PerToken", num_workers=1, timeout_s=20.0
    )
    trajectory = make_trajectory().with_sampled([3, 4], [-1.0, -1.0], [0, 0])

    async def score() -> Outcome:
        async with RewardPool(config, tokenizer=tokenizer) as pool:
            return await pool.score(make_prompt(), trajectory, "text")

    outcome = asyncio.run(score())
    assert (outcome.score, outcome.token_rewards) == (3.0, ((0, 1.0), (1, 2.0)))


def test_batch_of_a_manager_is_one_row_with_the_columns_of_verl(
    load: Callable[..., RewardFunction],
) -> None:
    tokenizer = load("Older").tokenizer  # type: ignore[attr-defined]
    batch = managers.batch_of({**CALL, "completion_ids": [3, 4, 5], "response_mask": [1, 0, 1]}, tokenizer)
    shapes = {name: tuple(column.shape) for name, column in batch.tensors().items()}
    assert shapes == {
        "prompts": (1, 2), "responses": (1, 3), "input_ids": (1, 5), "attention_mask": (1, 5), "position_ids": (1, 5),
        "response_mask": (1, 3),
    }  # fmt: skip
    assert batch[0].batch["input_ids"].tolist() == [1, 2, 3, 4, 5]  # type: ignore[index]
    assert batch.tensors()["response_mask"].tolist() == [[1, 0, 1]]
    others = batch[0].non_tensor_batch
    assert (others["level"], others["reward_model"]["ground_truth"], others["__num_turns__"]) == (2, "12", 4)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (1.0, "returned a float; a manager returns a dictionary with reward_score"),
        (torch.zeros(3), r"the tensor of rewards must be \[1, R\]"),
        (torch.tensor([[1.0, math.nan]]), "the tensor of rewards has nan in it"),
        (torch.tensor([[1e16, -1e16]]), "the tensor of rewards has 1e.16 in it"),
        ({"reward_score": float("nan")}, "whose score is nan"),
    ],
)
def test_what_is_no_reward_of_a_manager_is_named(
    load: Callable[..., RewardFunction], returned: Any, sentence: str
) -> None:
    with pytest.raises(BadReturnError, match=sentence):
        load("Older").read(returned)


@pytest.mark.parametrize(
    ("manager", "kwargs", "sentence"),
    [
        (
            "Nothing",
            {},
            "no class and registers no manager 'Nothing': it defines Older, PerToken, Single, Wrong, named",
        ),
        ("Older", {"bonsu": 1}, "reward.kwargs has bonsu, which Older does not take"),
        ("Wrong", {}, "Wrong has neither run_single.data. nor __call__.data."),
    ],
)
def test_manager_that_cannot_be_made_is_one_sentence(
    load: Callable[..., RewardFunction], manager: str, kwargs: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(LoadError, match=sentence):
        load(manager, **kwargs)


def test_manager_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="reward.manager needs the tokenizer of a model"):
        run(tmp_path, "", ["12"], manager="Single")


@pytest.mark.parametrize("name", ["naive", "batch", "prime", "dapo", "rate_limited"])
def test_managers_known_by_name_say_what_does_their_work(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"reward.manager is '{name}', which is built in here under other keys"
    ):
        RewardConfig(manager=name)


def test_manager_needs_its_file() -> None:
    with pytest.raises(ValueError, match="reward.manager is 'Mine', but reward.path is empty"):
        RewardConfig(manager="Mine")


def test_reward_files_import_the_names_from_where_they_are_documented() -> None:
    from strop.rewards.managers import RewardManagerBase, register

    assert (RewardManagerBase, register) == (managers.RewardManagerBase, managers.register)
