"""Functions that take lists: all answers to a prompt at once, in lists, arrays and tensors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reward_cases import make_prompt, write_reward

from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import Outcome, RewardConfig, RewardError, RewardPool, try_loading
from strop.rewards.certify.certificate import inspect_reward
from strop.rewards.config import FunctionConfig, OnFailureConfig
from strop.trainer.reward_trial import probe_answers

LONGEST = """
def longest(completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    most = max(map(len, texts))
    return [float(len(text) == most) for text in texts]


def longest_of_batch(data_sources, solution_strs, ground_truths, extra_infos):
    most = max(map(len, solution_strs))
    return [{"score": float(len(text) == most), "of": len(solution_strs)} for text in solution_strs]
"""


def scored_together(config: RewardConfig, texts: Sequence[str]) -> list[Outcome]:
    """The outcomes of these answers to one prompt, as the player asks for them."""
    (outcomes,) = scored_of_prompts(config, texts, [make_prompt()])
    return outcomes


def scored_of_prompts(
    config: RewardConfig, texts: Sequence[str], prompts: Sequence[Prompt]
) -> list[list[Outcome]]:
    """The same of several prompts, which are answered alike, in one pool."""

    async def together(pool: RewardPool, prompt: Prompt) -> list[Outcome]:
        played = [
            Trajectory(uid=prompt.uid, sample_index=number, prompt_ids=prompt.token_ids)
            for number in range(len(texts))
        ]
        alone = [
            await pool.score(prompt, one, text, in_group=True)
            for one, text in zip(played, texts, strict=True)
        ]
        return await pool.compare(prompt, list(zip(texts, alone, strict=True)), played)

    async def run() -> list[list[Outcome]]:
        async with RewardPool(config) as pool:
            assert pool.compares
            return [await together(pool, prompt) for prompt in prompts]

    return asyncio.run(run())


def scores(outcomes: Sequence[Outcome]) -> list[float | None]:
    return [one.score for one in outcomes]


@pytest.mark.parametrize("name", ["longest", "longest_of_batch"])
def test_a_function_that_compares_gets_all_answers_to_the_prompt(tmp_path: Path, name: str) -> None:
    config = RewardConfig(path=write_reward(tmp_path, LONGEST), name=name)
    outcomes = scored_together(config, ["a", "abc", "ab"])
    assert scores(outcomes) == [0.0, 1.0, 0.0]
    assert [one.parts["acc"] for one in outcomes] == [0.0, 1.0, 0.0], (
        "a single reward of 0 or 1 is its own verdict"
    )
    if name == "longest_of_batch":
        assert [one.parts["of"] for one in outcomes] == [3, 3, 3]


LOGGING = """
def sync(completions, log_extra, log_metric, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    log_extra("first", [text[:1] or None for text in texts])
    log_metric("acc", 1.0)
    return [0.25 * len(text) + 0.1 for text in texts]


async def deferred(completions, log_extra=None, log_metric=None, **columns):
    return sync(completions, log_extra, log_metric)


def short(completions, log_extra, **columns):
    log_extra("first", ["a"])
    return [0.5] * len(completions)


def staged(completions, trainer_state, **columns):
    return [float(trainer_state.global_step)] * len(completions)
"""


@pytest.mark.parametrize("name", ["sync", "deferred"])
def test_what_a_function_of_trl_logs_is_a_part_of_the_reward(tmp_path: Path, name: str) -> None:
    config = RewardConfig(path=write_reward(tmp_path, LOGGING), name=name)
    parts = [one.parts for one in scored_together(config, ["abc", ""])]
    assert parts == [{"first": "a", "metric/acc": 1.0}, {"metric/acc": 1.0}], "a logged number is no verdict"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("short", r"log_extra\('first', ...\) has 1 values for 2 answers; give one for each"),
        ("staged", "it needs trainer_state, .* TRL passes its trainer and environments, strop does not"),
    ],
)
def test_what_trl_would_not_take_or_strop_does_not_give_is_named(
    tmp_path: Path, name: str, sentence: str
) -> None:
    outcomes = scored_together(RewardConfig(path=write_reward(tmp_path, LOGGING), name=name), ["a", "b"])
    assert all(re.search(sentence, one.error) for one in outcomes), outcomes


RETURNED = """
import numpy as np, pandas, torch
MADE = {
    "array": np.array,
    "array of one column": lambda x: np.array(x).reshape(-1, 1),
    "half precision": lambda x: np.array(x, dtype=np.float16),
    "truth values": lambda x: np.array(x) > 0.5,
    "column": pandas.Series,
    "tensor": torch.tensor,
    "list of tensors": lambda x: [torch.tensor(one) for one in x],
    "list of one-element tensors": lambda x: [torch.tensor([one]) for one in x],
}

def by_kind(completions, kind, **columns):
    return MADE[kind[0]](longest(completions))

def of_batch(data_sources, solution_strs, ground_truths, extra_infos):
    found = longest_of_batch(data_sources, solution_strs, ground_truths, extra_infos)
    return torch.tensor([one["score"] for one in found])
"""
KINDS = re.findall(r'^    "(.+)":', RETURNED, re.MULTILINE)


def test_lists_may_be_arrays_and_tensors(tmp_path: Path) -> None:
    path = write_reward(tmp_path, LONGEST + RETURNED)
    config = RewardConfig(path=path, name="by_kind", max_memory_gib=None, num_workers=1)
    prompts = [make_prompt(columns={"kind": kind}) for kind in KINDS]
    found = scored_of_prompts(config, ["a", "abc", "ab"], prompts)
    assert len(KINDS) == 8
    assert dict(zip(KINDS, map(scores, found), strict=True)) == {kind: [0.0, 1.0, 0.0] for kind in KINDS}


def test_so_may_those_of_a_function_of_whole_batches(tmp_path: Path) -> None:
    path = write_reward(tmp_path, LONGEST + RETURNED)
    config = RewardConfig(path=path, name="of_batch", max_memory_gib=None, num_workers=1)
    assert scores(scored_together(config, ["a", "abc", "ab"])) == [0.0, 1.0, 0.0]


def test_queries_of_openrlhf_are_those_of_the_whole_group(tmp_path: Path) -> None:
    """Places by length, from the shortest, with a number to log of each, and one of all."""
    source = """
    def reward_func(queries, prompts, labels):
        order = sorted(map(len, queries))
        places = [float(order.index(len(one))) for one in queries]
        return {"rewards": places, "scores": places, "extra_logs": {"length": list(map(len, queries)), "all": 7.0}}
    """
    config = RewardConfig(path=write_reward(tmp_path, source), name="reward_func", num_workers=1)
    outcomes = scored_together(config, ["a", "abc", "ab"])
    assert scores(outcomes) == [0.0, 2.0, 1.0]
    asked = len("7 + 5 = ?")
    assert [one.parts["length"] for one in outcomes] == [asked + 1, asked + 3, asked + 2]
    assert [one.parts["all"] for one in outcomes] == [7.0] * 3


BAD = """
import os
import time

def f(completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    for text in texts:
        if "raises" in text:
            raise ZeroDivisionError("by this answer")
        if "hangs" in text:
            time.sleep(600)
        if "dies" in text:
            os._exit(3)
    most = max(map(len, texts))
    return [
        None if "none" in text else float("nan") if "nan" in text else float(len(text) == most) for text in texts
    ]
"""


@pytest.mark.parametrize(
    ("bad", "kind", "sentence"),
    [
        ("raises " * 9, "error", "ZeroDivisionError: by this answer"),
        ("hangs " * 9, "timeout", "did not finish in 1 s (reward.timeout_s)"),
        ("dies " * 9, "error", "exited with status 3"),
        ("none " * 9, "error", "returned None"),
        ("nan", "error", "returned nan"),
    ],
)
def test_one_bad_answer_costs_only_itself_and_the_others_are_compared(
    tmp_path: Path, bad: str, kind: str, sentence: str
) -> None:
    """The bad one is the longest where it is not scored at all; the longest of the others then is "abc"."""
    config = RewardConfig(path=write_reward(tmp_path, BAD), name="f", timeout_s=1.0, num_workers=1)
    outcomes = scored_together(config, ["a", bad, "abc", "abcd" if bad == "nan" else "ab"])
    expected = [0.0, None, 0.0, 1.0] if bad == "nan" else [0.0, None, 1.0, 0.0]
    if bad.startswith("none"):  # the function has seen it, and it was the longest
        expected = [0.0, None, 0.0, 0.0]
    assert scores(outcomes) == expected
    assert outcomes[1].kind == kind
    assert sentence in outcomes[1].error


def test_a_function_that_fails_on_groups_alone_says_so_of_each(tmp_path: Path) -> None:
    source = "def f(completions):\n    return [1.0]\n"
    config = RewardConfig(
        path=write_reward(tmp_path, source),
        name="f",
        on_failure=OnFailureConfig(error="fixed"),
        failed_score=-1.0,
    )
    outcomes = scored_together(config, ["a", "b"])  # alone, each of them has its one score
    assert [(one.kind, one.fallback_score) for one in outcomes] == [("error", -1.0)] * 2
    assert "returned the list [1.0] for 2 samples; this kind of function returns a list" in outcomes[0].error


def test_functions_of_both_kinds_are_added(tmp_path: Path) -> None:
    """1 for the right answer, and half a point for the longest: the truth is "abc", and "abcd" is longer."""
    right = "def compute_score(solution_str):\n    ok = solution_str == 'abc'\n    return {'score': ok, 'acc': ok}\n"
    path = write_reward(tmp_path, LONGEST + right)
    functions = (FunctionConfig(path=path), FunctionConfig(path=path, name="longest", weight=0.5))
    outcomes = scored_together(RewardConfig(functions=functions), ["abc", "abcd", "x"])
    assert scores(outcomes) == [1.0, 0.5, 0.0]
    assert [one.parts["acc"] for one in outcomes] == [True, False, False]
    assert [one.parts["longest"] for one in outcomes] == [0.0, 1.0, 0.0]


def test_what_an_agent_has_scored_and_what_failed_before_stays(tmp_path: Path) -> None:
    config = RewardConfig(path=write_reward(tmp_path, LONGEST), name="longest", num_workers=1)
    prompt = make_prompt()
    given: Mapping[str, Any] = {"uid": prompt.uid, "prompt_ids": prompt.token_ids}

    async def run() -> list[Outcome]:
        async with RewardPool(config) as pool:
            played = [
                Trajectory(**given, sample_index=0),
                Trajectory(**given, sample_index=1, reward_score=0.25),
                Trajectory(**given, sample_index=2),
            ]
            known = [
                Outcome(kind="score", score=0.0),
                Outcome(kind="score", score=0.25),
                Outcome(kind="infrastructure", error="a service failed"),
            ]
            texts = ["a", "much longer", "longer still, but without a score"]
            return await pool.compare(prompt, list(zip(texts, known, strict=True)), played)

    outcomes = asyncio.run(run())
    assert scores(outcomes) == [1.0, 0.25, None]
    assert outcomes[2].error == "a service failed"
    assert "acc" not in outcomes[1].parts


STANDARD = """
import statistics

def standard(completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    values = [float(text) for text in texts]
    spread = statistics.stdev(values)  # raises for one answer
    return [(value - statistics.mean(values)) / (spread or 1.0) for value in values]
"""


def test_a_bad_answer_is_found_for_a_function_that_needs_several(tmp_path: Path) -> None:
    """Of 1, 2 and 3 the mean is 2 and the standard deviation 1. One answer alone always fails."""
    config = RewardConfig(path=write_reward(tmp_path, STANDARD), name="standard", num_workers=1)
    outcomes = scored_together(config, ["1", "2", "none", "3"])
    assert scores(outcomes) == [-1.0, 0.0, None, 1.0]
    assert "could not convert string to float: 'none'" in outcomes[2].error


def test_where_no_answer_can_be_blamed_all_have_the_error_of_the_group(tmp_path: Path) -> None:
    config = RewardConfig(path=write_reward(tmp_path, STANDARD), name="standard", num_workers=1)
    outcomes = scored_together(config, ["1", "none", "nothing", "3"])
    assert scores(outcomes) == [None] * 4
    assert {"could not convert string to float: 'none'" in one.error for one in outcomes} == {True}


def test_an_answer_that_is_good_alone_may_be_what_the_group_fails_for(tmp_path: Path) -> None:
    source = """
    def once(solution_strs, data_sources, ground_truths, extra_infos):
        assert solution_strs.count("b") < 2, "twice"
        return [float(len(one)) for one in solution_strs]
    """
    config = RewardConfig(path=write_reward(tmp_path, source), name="once", num_workers=1)
    outcomes = scored_together(config, ["aa", "b", "b", "ccc"])
    assert scores(outcomes) == [2.0, None, 1.0, 3.0]
    assert "twice" in outcomes[1].error


@pytest.mark.parametrize("truth", ["7", "none"])
def test_the_look_before_the_start_gives_groups(tmp_path: Path, truth: str) -> None:
    """A right answer that is no number fails in a group with others, and in one of its own."""

    async def probe(group_size: int) -> list[Outcome]:
        config = RewardConfig(path=write_reward(tmp_path, STANDARD), name="standard", num_workers=1)
        async with RewardPool(config) as pool:
            prompt = make_prompt()
            return await probe_answers(pool, [prompt] * 2, [truth, "5"], group_size=group_size)

    outcomes = asyncio.run(probe(4))
    expected = -(3**0.5) / 2  # 7, 5, 7, 5: one from the mean each, and a deviation of sqrt(4 / 3)
    assert scores(outcomes) == (
        [pytest.approx(-expected), pytest.approx(expected)] if truth == "7" else [None, 0.0]
    )
    with pytest.raises(RewardError, match="the reward function failed on all 2 probes"):
        asyncio.run(probe(1))


def test_a_certificate_of_a_function_that_needs_several(tmp_path: Path) -> None:
    """All answers to a row are one group, in both orders."""
    source = """
    import statistics

    def near(completions, ground_truth):
        texts = [one[-1]["content"] for one in completions]
        statistics.stdev(map(len, texts))  # raises for one answer
        return [float(text.strip() == truth) for text, truth in zip(texts, ground_truth)]
    """
    config = RewardConfig(path=write_reward(tmp_path, source), name="near", num_workers=2)
    prompts = [replace(make_prompt(ground_truth=truth), row=row) for row, truth in enumerate(["12", "345"])]
    assert asyncio.run(try_loading(config))
    certificate = inspect_reward("near", config, prompts, in_groups=True)
    assert certificate.right_mean == 1.0
    assert certificate.junk_mean == 0.0
    assert not [
        one for one in certificate.findings if one.rule in ("failures", "deterministic", "right answers")
    ]
