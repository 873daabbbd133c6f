"""What a reward function is given, what comes back, and how the pool behaves around it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from reward_cases import (
    DEADLINE_S,
    FAULTS,
    make_prompt,
    make_trajectory,
    reward_processes,
    score_all,
    score_one,
    write_reward,
)

from strop.rewards import Outcome, RewardConfig, RewardPool

pytestmark = pytest.mark.timeout(60)


def test_function_gets_the_keywords_of_verl(tmp_path: Path) -> None:
    source = """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
            assert (data_source, solution_str) == ("strop/exact", "12")
            assert ground_truth == {"target": [1, 2]}
            seen = ",".join(sorted(extra_info))
            turns = extra_info["num_turns"]
            return {"score": bonus, "index": extra_info["index"], "turns": turns, "seen": seen}
    """

    async def run() -> Outcome:
        config = RewardConfig(path=write_reward(tmp_path, source), kwargs={"bonus": 0.25}, num_workers=1)
        async with RewardPool(config) as pool:
            prompt = make_prompt(ground_truth={"target": [1, 2]})
            return await pool.score(prompt, make_trajectory(num_turns=4, extra={"tool_rewards": [1.0]}), "12")

    outcome = asyncio.run(run())
    assert (outcome.kind, outcome.score, outcome.error) == ("score", 0.25, "")
    assert outcome.parts == {
        "index": 3,
        "turns": 4,
        "seen": "index,num_turns,rollout_reward_scores,tool_rewards,turn_scores",
    }


def test_function_may_leave_out_arguments_it_does_not_use(tmp_path: Path) -> None:
    source = "def compute_score(solution_str, ground_truth):\n    return solution_str == ground_truth"
    outcome = score_one(tmp_path, source)
    assert (outcome.score, outcome.parts) == (1.0, {"acc": 1.0})


def test_coroutine_function_is_awaited(tmp_path: Path) -> None:
    source = """
        import asyncio
        async def compute_score(solution_str, **_):
            await asyncio.sleep(0.01)
            return len(solution_str)
    """
    assert score_one(tmp_path, source).score == 2.0


@pytest.mark.parametrize("prefix", ["", "async "])
def test_trl_function_gets_message_lists_and_columns(tmp_path: Path, prefix: str) -> None:
    source = f"""
        {prefix}def compute_score(prompts, completions, answer, **kwargs):
            assert prompts == [[{{"role": "user", "content": "7 + 5 = ?"}}]], prompts
            assert completions == [[{{"role": "assistant", "content": "12"}}]], completions
            assert answer == ["twelve"] and kwargs["ground_truth"] == ["12"]
            return [0.5]
    """
    outcome = score_one(tmp_path, source, prompt=make_prompt(columns={"answer": "twelve"}))
    assert (outcome.score, outcome.error) == (0.5, "")


def test_trl_function_gets_texts_when_the_prompt_column_is_text(tmp_path: Path) -> None:
    source = """
        def compute_score(prompts, completions):
            return [float((prompts, completions) == (["7?"], ["12"]))]
    """
    assert score_one(tmp_path, source, prompt=make_prompt(columns={"prompt": "7?"})).score == 1.0


@pytest.mark.parametrize(
    ("parameters", "score"),
    [
        ("completion_ids, **columns", "len(completion_ids[0])"),
        ("prompts", "len(prompts[0])"),
        ("*, prompts, ground_truth", "len(prompts[0]) * (ground_truth == ['12'])"),
    ],
)
def test_trl_function_may_take_the_lists_it_needs_alone(tmp_path: Path, parameters: str, score: str) -> None:
    source = f"def compute_score({parameters}):\n    return [{score}]"
    path = write_reward(tmp_path, source)
    prompt = make_prompt(columns={"prompt": "7?"})
    trajectory = make_trajectory().with_sampled((4, 9), (0.0, 0.0), (0, 0))

    async def run() -> Outcome:
        async with RewardPool(RewardConfig(path=path, num_workers=1)) as pool:
            return await pool.score(prompt, trajectory, "12")

    outcome = asyncio.run(run())
    assert (outcome.score, outcome.error) == (2.0, ""), "two tokens, or two characters"


def test_a_function_of_single_answers_may_have_a_parameter_of_its_own_called_prompts(tmp_path: Path) -> None:
    assert score_one(tmp_path, "def compute_score(solution_str, prompts=2):\n    return prompts").score == 2.0


def test_trl_function_without_its_column_names_the_columns_there_are(tmp_path: Path) -> None:
    source = "def compute_score(completions, solution):\n    return [1.0]"
    outcome = score_one(tmp_path, source, prompt=make_prompt(columns={"answer": "12", "level": 2}))
    assert outcome.kind == "error"
    assert "needs solution, but the data has only the columns answer, level" in outcome.error


def test_batch_function_gets_lists_of_one(tmp_path: Path) -> None:
    source = """
        def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
            assert len(data_sources) == len(extra_infos) == 1
            return [{"score": float(s == g), "pred": s} for s, g in zip(solution_strs, ground_truths)]
    """
    outcome = score_one(tmp_path, source)
    assert (outcome.score, outcome.parts) == (1.0, {"acc": 1.0, "pred": "12"})


def test_dictionary_keys_may_differ_between_samples(tmp_path: Path) -> None:
    source = """
        def compute_score(solution_str, **_):
            return {"score": 1, solution_str: True} if solution_str != "none" else 0
    """
    outcomes = score_all(RewardConfig(path=write_reward(tmp_path, source)), ["a", "none", "b"])
    assert [dict(outcome.parts) for outcome in outcomes] == [
        {"acc": 1.0, "a": True},
        {"acc": 0.0},
        {"acc": 1.0, "b": True},
    ]


def test_parts_become_plain_values(tmp_path: Path) -> None:
    source = """
        import numpy
        def compute_score(**_):
            return {"score": numpy.float32(0.5), "count": numpy.int64(3), "pred": None, "steps": [1, 2]}
    """
    outcome = score_one(tmp_path, source, timeout_s=5.0)
    assert (outcome.score, outcome.parts) == (0.5, {"count": 3, "steps": "[1, 2]"})


def test_deadline_counts_from_the_start_of_the_sample_not_from_its_place_in_the_queue(tmp_path: Path) -> None:
    # Ten samples of 0.1 s on one worker: the last waits 0.9 s, three times its own limit.
    source = "import time\ndef compute_score(**_):\n    time.sleep(0.1)\n    return 1"
    config = RewardConfig(path=write_reward(tmp_path, source), num_workers=1, timeout_s=DEADLINE_S)
    assert [outcome.kind for outcome in score_all(config, ["a"] * 10)] == ["score"] * 10


def test_deadline_leaves_out_the_imports_of_a_built_in_scorer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "reasoning_gym"  # a stand-in that loads slowly; the workers get this search path
    package.mkdir()
    (package / "__init__.py").write_text("import time\ntime.sleep(0.8)")
    (package / "factory.py").write_text(
        "import time\n\n\nclass Slow:\n    pass\n\n\nDATASETS = {'slow': (Slow, None)}\n"
        "def get_score_answer_fn(task):\n    return lambda answer, entry: time.sleep(0.05) or 0.25\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def run() -> Outcome:
        async with RewardPool(RewardConfig(num_workers=1, timeout_s=DEADLINE_S)) as pool:
            prompt = make_prompt(data_source="reasoning_gym/slow")
            extra = {"reasoning_gym": '{"answer": "1"}'}
            return await pool.score(prompt, make_trajectory(extra=extra), "0")

    outcome = asyncio.run(run())
    assert (outcome.error, outcome.score) == ("", 0.25)


def test_deadline_holds_while_the_event_loop_is_busy(tmp_path: Path) -> None:
    config = RewardConfig(path=write_reward(tmp_path, FAULTS), num_workers=1, timeout_s=DEADLINE_S)

    async def run() -> tuple[Outcome, int]:
        async with RewardPool(config) as pool:
            waiting = asyncio.ensure_future(pool.score(make_prompt(), make_trajectory(), "sleep"))
            await asyncio.sleep(0)
            pids = {child.pid for child in reward_processes()}
            time.sleep(1.5)  # a training step in the same thread
            replaced = {child.pid for child in reward_processes()} - pids
            return await waiting, len(replaced)

    outcome, replaced = asyncio.run(run())
    assert outcome.kind == "timeout"
    assert outcome.seconds < 1.4
    assert replaced == 1


def test_a_cancelled_caller_does_not_stop_the_others(tmp_path: Path) -> None:
    source = """
        import time
        def compute_score(solution_str, **_):
            time.sleep(0.05)
            return int(solution_str)
    """
    config = RewardConfig(path=write_reward(tmp_path, source), num_workers=1)

    async def run() -> list[float | None]:
        async with RewardPool(config) as pool:
            tasks = [
                asyncio.ensure_future(pool.score(make_prompt(), make_trajectory(), str(n))) for n in range(6)
            ]
            await asyncio.sleep(0.02)
            for task in tasks[::2]:
                task.cancel()
            return [(await task).score for task in tasks[1::2]]

    assert asyncio.run(run()) == [1.0, 3.0, 5.0]


def test_close_answers_what_is_still_waiting_and_leaves_no_process(tmp_path: Path) -> None:
    config = RewardConfig(path=write_reward(tmp_path, FAULTS))

    async def run() -> Outcome:
        pool = RewardPool(config)
        await pool.start()
        waiting = asyncio.ensure_future(pool.score(make_prompt(), make_trajectory(), "sleep"))
        await asyncio.sleep(0.1)
        await pool.close()
        return await waiting

    outcome = asyncio.run(run())
    assert (outcome.kind, outcome.error) == ("infrastructure", "not scored: the reward pool was closed")
    assert reward_processes() == []


def test_replaced_worker_runs_the_code_that_was_read_at_start(tmp_path: Path) -> None:
    config = RewardConfig(path=write_reward(tmp_path, FAULTS), num_workers=1)

    async def run() -> list[Outcome]:
        async with RewardPool(config) as pool:
            (tmp_path / "my_reward.py").write_text("this is no python")
            texts = ["exit", "7"]
            return [await pool.score(make_prompt(), make_trajectory(), text) for text in texts]

    died, scored = asyncio.run(run())
    assert died.kind == "error"
    assert scored.score == 1.0


def test_extra_info_that_is_no_plain_data_is_an_error_that_names_the_type(tmp_path: Path) -> None:
    path = write_reward(
        tmp_path, "def compute_score(extra_info, **_):\n    return float(extra_info['raw'] == b'\\xff')"
    )

    async def run() -> list[Outcome]:
        async with RewardPool(RewardConfig(path=path, num_workers=1)) as pool:
            return [
                await pool.score(make_prompt(), make_trajectory(extra={"raw": raw}), "12")
                for raw in (b"\xff", object())
            ]

    plain, broken = asyncio.run(run())
    assert plain.score == 1.0
    assert (
        "row 3 has an object in extra_info.raw, which cannot be sent to the processes that score"
        in broken.error
    )


def test_text_of_any_kind_arrives_unchanged(tmp_path: Path) -> None:
    texts = ["\n", "\x00", "\ud800", "é\u2028", "x" * 300_000, '["done"]']
    path = write_reward(tmp_path, "import zlib\ndef compute_score(solution_str, **_):\n"
                        "    return zlib.crc32(solution_str.encode('utf-16', 'surrogatepass'))")  # fmt: skip
    import zlib

    expected = [float(zlib.crc32(text.encode("utf-16", "surrogatepass"))) for text in texts]
    assert [outcome.score for outcome in score_all(RewardConfig(path=path), texts)] == expected


def test_slow_samples_after_quick_ones_are_shared_between_the_workers(tmp_path: Path) -> None:
    # 200 quick samples teach the pool to hand out many at once; then 8 of 0.2 s take two workers 0.8 s, and one 1.6 s.
    source = """
        import time
        def compute_score(solution_str, **_):
            time.sleep(0.2 * (solution_str == "slow"))
            return 1
    """
    config = RewardConfig(path=write_reward(tmp_path, source), num_workers=2)

    async def run() -> float:
        async with RewardPool(config) as pool:

            async def score(texts: list[str]) -> None:
                await asyncio.gather(*(pool.score(make_prompt(), make_trajectory(), text) for text in texts))

            await score(["quick"] * 200)
            started = time.monotonic()
            await score(["slow"] * 8)
            return time.monotonic() - started

    assert asyncio.run(run()) < 1.5


def test_a_result_that_comes_in_pieces_is_waited_for(tmp_path: Path) -> None:
    source = """
        def compute_score(solution_str, **_):
            return {"score": 1.0, "text": "x" * 1_000_000}
    """
    outcomes = score_all(RewardConfig(path=write_reward(tmp_path, source), num_workers=1), ["a", "b"])
    assert [(one.error, len(str(one.parts["text"]))) for one in outcomes] == [("", 1_000_000)] * 2


def test_worker_that_dies_while_idle_is_replaced(tmp_path: Path) -> None:
    config = RewardConfig(path=write_reward(tmp_path, FAULTS), num_workers=1)

    async def run() -> Outcome:
        async with RewardPool(config) as pool:
            await pool.score(make_prompt(), make_trajectory(), "1")
            for child in reward_processes():
                child.kill()
            return await pool.score(make_prompt(), make_trajectory(), "7")

    assert asyncio.run(run()).score == 1.0


def test_pool_that_is_not_running_says_so() -> None:
    async def run() -> None:
        await RewardPool(RewardConfig()).score(make_prompt(), make_trajectory(), "12")

    with pytest.raises(RuntimeError, match="not running; use `async with"):
        asyncio.run(run())


def test_cheap_functions_score_thousands_of_samples_per_second(tmp_path: Path) -> None:
    # 20000 to 30000 per second on two idle cores; the bound leaves room for a busy machine.
    path = write_reward(
        tmp_path, "def compute_score(solution_str, ground_truth):\n    return solution_str == ground_truth"
    )

    async def run() -> float:
        async with RewardPool(RewardConfig(path=path)) as pool:
            prompt, trajectory = make_prompt(), make_trajectory()
            started = time.perf_counter()
            outcomes = await asyncio.gather(*(pool.score(prompt, trajectory, "12") for _ in range(3000)))
            assert all(outcome.score == 1.0 for outcome in outcomes)
            return time.perf_counter() - started

    assert asyncio.run(run()) < 3000 / 1000


def test_worker_process_loads_no_heavy_package(tmp_path: Path) -> None:
    source = """
        import sys
        def compute_score(**_):
            heavy = {"torch", "transformers", "numpy", "pyarrow", "datasets", "sympy", "reasoning_gym"}
            return {"score": 0.0, "found": ",".join(sorted(heavy & set(sys.modules)))}
    """
    assert score_one(tmp_path, source).parts == {"acc": 0.0, "found": ""}


QUERIES = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    assert len(queries) == len(prompts) == len(labels) == 1
    answer = queries[0][len(prompts[0]):]
    rewards = torch.tensor([float(answer == labels[0]) + kwargs.get("bonus", 0)])
    return {"rewards": rewards, "scores": rewards / 2, "extra_logs": {"length": torch.tensor(float(len(answer)))}}
"""


def test_a_function_of_queries_gets_whole_texts(tmp_path: Path) -> None:
    outcome = score_one(tmp_path, QUERIES, name="reward_func", kwargs={"bonus": 0.25})
    assert (outcome.score, outcome.error) == (1.25, "")
    assert outcome.parts == {"scores": 0.625, "length": 2.0}


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("{'scores': [1.0]}", 'returned a dictionary without "rewards"'),
        ("[1.0, 2.0]", "for one sample; it is one number per query"),
        ("1.0", "for one sample; it is one number per query"),
    ],
)
def test_a_function_of_queries_returns_one_reward_per_query(
    tmp_path: Path, returned: str, sentence: str
) -> None:
    source = f"def reward_func(queries, prompts, labels):\n    return {returned}"
    outcome = score_one(tmp_path, source, name="reward_func")
    assert outcome.kind == "error"
    assert sentence in outcome.error
