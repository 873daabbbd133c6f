"""Coroutine functions: calls that wait at the same time, each with its own limit, error and result."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from http_server import LocalServer
from reward_cases import make_prompt, make_trajectory, reward_processes, score_all, write_reward

from strop.rewards import Outcome, RewardConfig, RewardPool, worker_coroutines
from strop.rewards.config import FunctionConfig, OnFailureConfig

pytestmark = pytest.mark.timeout(60)

GRADER = """
import asyncio
from strop.rewards import RewardUnavailable

async def compute_score(solution_str, port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET /{solution_str} HTTP/1.0\\r\\n\\r\\n".encode())
        head, _, body = (await reader.read()).partition(b"\\r\\n\\r\\n")
    finally:
        writer.close()
    if b" 503 " in head.splitlines()[0]:
        raise RewardUnavailable("the grader is busy")
    return {"score": float(body), "answer": solution_str}
"""


class Grader(LocalServer):
    """Answers /7 with 7 after 50 ms, /slow when it is closed, /down with 503, /odd with no number."""

    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.present = self.most = 0
        self.asked: list[tuple[str, float]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Grader

    def do_GET(self) -> None:
        text, server = self.path[1:], self.server
        with server.lock:
            server.asked.append((text, time.monotonic()))
            server.present += 1
            server.most = max(server.most, server.present)
        server.closing.wait(60.0 if text == "slow" else 0.05)
        with server.lock:
            server.present -= 1
        self.send_response(503 if text == "down" else 200)
        self.end_headers()
        self.wfile.write(b"what?" if text == "odd" else text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def grader() -> Iterator[Grader]:
    server = Grader()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()


def config_of(folder: Path, source: str, **fields: Any) -> RewardConfig:
    on_failure = OnFailureConfig(infrastructure="exclude")
    fields = {"num_workers": 1, "timeout_s": 20.0, "on_failure": on_failure, **fields}
    return RewardConfig(path=write_reward(folder, source), **fields)


def scored_in(config: RewardConfig, texts: list[str]) -> tuple[list[Outcome], float]:
    """The outcomes, and the seconds of scoring without those of starting the pool."""

    async def run() -> tuple[list[Outcome], float]:
        async with RewardPool(config) as pool:
            began = time.monotonic()
            scoring = [pool.score(make_prompt(), make_trajectory(), text) for text in texts]
            return await asyncio.gather(*scoring), time.monotonic() - began

    return asyncio.run(run())


def test_calls_of_one_process_wait_together_and_keep_their_order(tmp_path: Path, grader: Grader) -> None:
    config = config_of(tmp_path, GRADER, kwargs={"port": grader.server_port})
    outcomes, seconds = scored_in(config, [str(number) for number in range(60)])
    assert [outcome.score for outcome in outcomes] == [float(number) for number in range(60)]
    assert [outcome.parts["answer"] for outcome in outcomes] == [str(number) for number in range(60)]
    assert seconds < 2.0, "one after the other they take 3 s"
    assert all(outcome.seconds > 0.04 for outcome in outcomes)


@pytest.mark.parametrize(("limit", "processes", "most"), [(1, 1, 1), (3, 1, 3), (3, 2, 6)])
def test_so_many_calls_are_under_way_as_the_setting_says(
    tmp_path: Path, grader: Grader, limit: int, processes: int, most: int
) -> None:
    kwargs = {"port": grader.server_port}
    config = config_of(tmp_path, GRADER, kwargs=kwargs, max_concurrent=limit, num_workers=processes)
    outcomes, _ = scored_in(config, ["1"] * 12)
    assert [outcome.score for outcome in outcomes] == [1.0] * 12
    assert grader.most == most


def test_failures_and_time_limits_belong_to_their_own_samples(tmp_path: Path, grader: Grader) -> None:
    config = config_of(tmp_path, GRADER, kwargs={"port": grader.server_port}, timeout_s=1.0)
    texts = ["1", "slow", "down", "2", "odd", "slow", "3"]
    outcomes, seconds = scored_in(config, texts)
    kinds = ["score", "timeout", "infrastructure", "score", "error", "timeout", "score"]
    assert [outcome.kind for outcome in outcomes] == kinds
    assert [outcome.score for outcome in outcomes if outcome.kind == "score"] == [1.0, 2.0, 3.0]
    label = "compute_score in my_reward.py"
    assert outcomes[1].error == outcomes[5].error
    assert outcomes[1].error == (
        f"{label} did not finish in 1 s (reward.timeout_s) at my_reward.py:9 in compute_score"
    )
    assert outcomes[2].error == (
        f"{label} could not score: RewardUnavailable: the grader is busy at my_reward.py:13"
    )
    assert outcomes[4].error.startswith(f"{label} raised ValueError: could not convert string to float")
    assert all(1.0 <= outcome.seconds < 2.5 for outcome in outcomes if outcome.kind == "timeout")
    assert seconds < 5.0
    asked = sorted(text for text, _ in grader.asked)
    assert asked == sorted(texts), "nothing is asked again because something else failed"


def test_one_at_a_time_a_call_that_waits_too_long_is_said_with_its_line(
    tmp_path: Path, grader: Grader
) -> None:
    kwargs = {"port": grader.server_port}
    config = config_of(tmp_path, GRADER, kwargs=kwargs, timeout_s=0.3, max_concurrent=1)
    late, next_one = score_all(config, ["slow", "1"])
    assert late.error == (
        "compute_score in my_reward.py did not finish in 0.3 s (reward.timeout_s) at my_reward.py:9 in compute_score"
    )
    assert next_one.score == 1.0


BAD = """
import asyncio, ctypes, os, sys, time
async def compute_score(solution_str):
    await asyncio.sleep(0.05)
    match solution_str:
        case "exit": os._exit(3)
        case "segfault": ctypes.string_at(8)
        case "block": time.sleep(60)
        case "memory": bytearray(1 << 40)
        case "deaf":
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    pass
        case "leave": sys.exit("bye")
        case "cancel": raise asyncio.CancelledError
        case "next": next(iter(()))
        case "child": await asyncio.create_task(leave())
        case "fork":
            if os.fork() == 0:
                return 9.0
    await asyncio.sleep(0.1)
    return float(solution_str) if solution_str.isdigit() else 0.5

async def leave():
    sys.exit("bye")
"""


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        ("exit", "error", "the worker process exited with status 3 in compute_score"),
        ("segfault", "error", "the worker process died with SIGSEGV in compute_score"),
        ("block", "timeout", "did not finish in 1 s (reward.timeout_s) at my_reward.py:8 in compute_score"),
        ("deaf", "timeout", "did not finish in 1 s (reward.timeout_s) at my_reward.py:13 in compute_score"),
        ("memory", "error", "ran out of memory: MemoryError at my_reward.py:9; a worker may allocate 1 GiB"),
        ("leave", "error", "raised SystemExit: bye at my_reward.py:16"),
        ("cancel", "error", "raised CancelledError at my_reward.py:17"),
        ("next", "error", "raised StopIteration at my_reward.py:18"),
        ("child", "error", "the worker process exited with status 1 in compute_score"),
        ("fork", "score", ""),
    ],
)
def test_what_one_call_does_to_the_process_costs_itself_alone(
    tmp_path: Path, text: str, kind: str, sentence: str
) -> None:
    config = config_of(tmp_path, BAD, timeout_s=1.0, max_memory_gib=1.0)
    texts = ["1", "2", text, "3", "4"]
    outcomes = score_all(config, texts)
    assert [outcome.score for outcome in outcomes if outcome is not outcomes[2]] == [1.0, 2.0, 3.0, 4.0]
    assert outcomes[2].kind == kind, outcomes[2]
    assert sentence in outcomes[2].error
    assert not reward_processes()


def test_calls_that_come_to_a_blocked_process_do_not_prolong_its_life(tmp_path: Path) -> None:
    """The third call is sent when the first two have begun and one of them blocks: it never says that it begins."""
    source = """
        import asyncio, time
        async def compute_score(solution_str):
            if solution_str == "block":
                await asyncio.sleep(0.1)
                time.sleep(60)
            await asyncio.sleep(0.3)
            return 1.0
    """

    async def run() -> tuple[list[Outcome], float]:
        async with RewardPool(config_of(tmp_path, source, timeout_s=0.6)) as pool:
            began = time.monotonic()
            tasks = []
            for text in ("block", "1", "2"):
                tasks.append(asyncio.create_task(pool.score(make_prompt(), make_trajectory(), text)))
                await asyncio.sleep(0.2 * (text == "1"))
            return await asyncio.gather(*tasks), time.monotonic() - began

    outcomes, seconds = asyncio.run(run())
    assert [outcome.kind for outcome in outcomes] == ["timeout", "score", "score"]
    assert seconds < 20.0


@pytest.mark.parametrize(
    ("at_cancellation", "timeout_s", "seconds"),
    [("await asyncio.sleep(60)", 1.2, 1.1), ("await asyncio.sleep(0.1); time.sleep(60)", 0.4, 0.3)],
    ids=["it does not end", "it blocks the process"],
)
def test_what_a_cancelled_call_does_costs_none_of_those_that_come_later(
    tmp_path: Path, at_cancellation: str, timeout_s: float, seconds: float
) -> None:
    source = f"""
        import asyncio, time
        async def compute_score(solution_str):
            try:
                await asyncio.sleep(60 if solution_str == "hang" else {seconds})
            except asyncio.CancelledError:
                {at_cancellation}
            return 1.0
    """

    async def run() -> list[Outcome]:
        async with RewardPool(config_of(tmp_path, source, timeout_s=timeout_s)) as pool:
            return [await pool.score(make_prompt(), make_trajectory(), text) for text in ("hang", "later")]

    assert [outcome.kind for outcome in asyncio.run(run())] == ["timeout", "score"]


def test_processes_that_leave_after_their_time_limits_are_no_deaths(tmp_path: Path) -> None:
    """All of them leave a second after the last result, with calls that were sent and have not begun."""
    source = """
        import asyncio
        async def compute_score(solution_str):
            try:
                await asyncio.sleep(60 if solution_str == "hang" else 0.01)
            except asyncio.CancelledError:
                await asyncio.sleep(60)
            return 1.0
    """
    config = config_of(tmp_path, source, timeout_s=0.3, num_workers=3, max_concurrent=2)
    outcomes = score_all(config, ["hang"] * 6 + ["1"] * 30)
    assert [outcome.kind for outcome in outcomes] == ["timeout"] * 6 + ["score"] * 30


def test_a_function_that_cancels_its_task_is_an_error_and_others_go_on(tmp_path: Path) -> None:
    source = """
        import asyncio
        async def compute_score(solution_str):
            if solution_str == "cancel":
                asyncio.current_task().cancel()
            else:
                await asyncio.sleep(0)
            return 1.0
    """
    first, second = score_all(config_of(tmp_path, source, timeout_s=1.0), ["cancel", "score"])
    assert (first.kind, first.error) == ("error", "the function cancelled the task that it runs in")
    assert second.score == 1.0


def test_a_call_that_waits_pays_its_share_alone_of_what_calls_that_end_have_computed(tmp_path: Path) -> None:
    """Two at a time: beside one that waits for 0.6 s eight compute 0.5 s each, one after the other. The share of the
    first is half a second for two of them, of a limit of two seconds."""
    source = """
        import asyncio, time
        async def compute_score(solution_str):
            if solution_str == "wait":
                for _ in range(6):
                    await asyncio.sleep(0.1)
                return 1.0
            time.sleep(0.5)
            return 2.0
    """
    config = config_of(tmp_path, source, timeout_s=2.0, max_concurrent=2)
    outcomes = score_all(config, ["wait", *["compute"] * 8])
    assert [outcome.score for outcome in outcomes] == [1.0, *[2.0] * 8]


def test_computing_is_divided_between_calls(tmp_path: Path) -> None:
    """Eight calls that block for 0.3 s each take 2.4 s together, and none of them reaches its limit of a second."""
    source = """
        import asyncio, time
        async def compute_score(solution_str):
            await asyncio.sleep(0)
            time.sleep(0.3)
            await asyncio.sleep(0)
            return float(solution_str)
    """
    outcomes = score_all(config_of(tmp_path, source, timeout_s=1.0), [str(number) for number in range(8)])
    assert [outcome.score for outcome in outcomes] == [float(number) for number in range(8)]


def test_waiting_is_told_from_computing_on_the_loop_and_in_threads() -> None:
    watch = worker_coroutines._Watch()
    watch.select(0.2)
    waiting_s, computing_s = watch.lap()
    assert waiting_s > 0.15 > computing_s
    time.sleep(0.2)  # blocks the loop
    waiting_s, computing_s = watch.lap()
    assert waiting_s < 0.01 < 0.2 <= computing_s
    thread = threading.Thread(target=compute, args=(0.2,))
    began = time.monotonic()
    thread.start()
    watch.select(1.0)
    seconds = time.monotonic() - began
    thread.join()
    waiting_s, computing_s = watch.lap()
    assert computing_s >= 0.2
    assert waiting_s + computing_s >= seconds


def compute(seconds: float) -> None:
    while time.thread_time() < seconds:
        pass


def test_a_call_that_blocks_the_process_in_a_sandbox_takes_no_time_of_others(tmp_path: Path) -> None:
    source = """
        import asyncio, time
        from strop.utils.deadline import away
        async def compute_score(solution_str):
            await asyncio.sleep(0.1)
            if solution_str == "away":
                with away(20.0):
                    time.sleep(3.0)
            else:
                await asyncio.sleep(0.2)
            return 1.0
    """
    outcomes = score_all(config_of(tmp_path, source, timeout_s=1.0), ["away", "wait"])
    assert [outcome.kind for outcome in outcomes] == ["score", "score"]


def test_threads_that_calls_leave_behind_take_no_place_of_others(tmp_path: Path) -> None:
    source = """
        import asyncio, time
        def grade(text):
            time.sleep(60.0 if text == "hang" else 0.0)
            return float(text)
        async def compute_score(solution_str):
            return await asyncio.to_thread(grade, solution_str)
    """
    config = config_of(tmp_path, source, timeout_s=0.4, max_concurrent=2)
    outcomes = score_all(config, [text for number in range(8) for text in ("hang", str(number))])
    assert [outcome.kind for outcome in outcomes[::2]] == ["timeout"] * 8
    assert [outcome.score for outcome in outcomes[1::2]] == [float(number) for number in range(8)]
    assert not reward_processes()


def test_functions_without_async_are_called_where_no_loop_runs(tmp_path: Path) -> None:
    source = """
        import asyncio
        async def judge(solution_str):
            await asyncio.sleep(0.1)
            return 1.0
        def rule(solution_str):
            return asyncio.run(inner(solution_str))
        async def inner(text):
            return 10.0 * float(text)
    """
    path = write_reward(tmp_path, source)
    functions = tuple(FunctionConfig(path=path, name=name) for name in ("rule", "judge"))
    outcomes, seconds = scored_in(
        RewardConfig(functions=functions, num_workers=1, timeout_s=20.0),
        [str(number) for number in range(30)],
    )
    assert [outcome.score for outcome in outcomes] == [10.0 * number + 1.0 for number in range(30)]
    assert seconds < 2.0, "one after the other they take 3 s"


def test_memory_that_a_function_without_async_has_filled_is_free_when_it_is_reported(tmp_path: Path) -> None:
    source = """
        async def judge(solution_str):
            return 1.0
        def rule(solution_str):
            filling = []
            while solution_str == "fill":
                filling.append(bytes(len(filling) % 300 + 20))
            return 1.0
    """
    path = write_reward(tmp_path, source)
    functions = tuple(FunctionConfig(path=path, name=name) for name in ("rule", "judge"))
    config = RewardConfig(functions=functions, num_workers=1, timeout_s=20.0, max_memory_gib=0.3)
    full, other = score_all(config, ["fill", "1"])
    assert "rule in my_reward.py ran out of memory: MemoryError" in full.error
    assert other.score == 2.0


def test_built_in_scorers_score_beside_coroutines(tmp_path: Path) -> None:
    source = """
        import asyncio
        async def judge(solution_str):
            await asyncio.sleep(0.1)
            return 0.25
    """
    functions = (FunctionConfig(), FunctionConfig(path=write_reward(tmp_path, source), name="judge"))
    config = RewardConfig(functions=functions, num_workers=1, timeout_s=20.0)
    outcomes, seconds = scored_in(config, ["12", "7"] * 15)
    assert [outcome.score for outcome in outcomes] == [1.25, 0.25] * 15
    assert seconds < 2.0, "one after the other they take 3 s"


def test_time_in_a_sandbox_is_not_counted_for_the_call_that_is_in_it(tmp_path: Path) -> None:
    source = """
        import asyncio
        from strop.utils.deadline import away
        async def compute_score(solution_str):
            if solution_str == "away":
                with away(20.0):
                    await asyncio.sleep(1.2)
                return 1.0
            await asyncio.sleep(20.0)
    """
    outcomes = score_all(config_of(tmp_path, source, timeout_s=0.5), ["away", "wait"])
    assert [(outcome.kind, outcome.score) for outcome in outcomes] == [("score", 1.0), ("timeout", None)]
    assert outcomes[1].seconds < 1.1


def test_groups_wait_together(tmp_path: Path) -> None:
    source = """
        import asyncio
        async def compute_score(completions, **_):
            await asyncio.sleep(0.1)
            if any(one[-1]["content"] == "bad" for one in completions):
                raise ValueError("bad")
            return [float(one[-1]["content"]) for one in completions]
    """

    async def run() -> tuple[list[list[Outcome]], float]:
        async with RewardPool(config_of(tmp_path, source)) as pool:
            began = time.monotonic()
            groups = [
                [(str(number), Outcome(kind="score", score=0.0)), (last, Outcome(kind="score", score=0.0))]
                for number, last in enumerate(["7"] * 28 + ["bad"])
            ]
            trajectories = [make_trajectory(), make_trajectory()]
            scored = await asyncio.gather(
                *(pool.compare(make_prompt(), group, trajectories) for group in groups)
            )
            return scored, time.monotonic() - began

    scored, seconds = asyncio.run(run())
    assert [[outcome.score for outcome in group] for group in scored[:28]] == [
        [float(number), 7.0] for number in range(28)
    ]
    assert [(outcome.kind, outcome.score) for outcome in scored[28]] == [("score", 28.0), ("error", None)]
    assert seconds < 2.0, "one after the other they take 3 s"


OWN_LIMITS = """
import asyncio

async def ask(port, text):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET /{text} HTTP/1.0\\r\\n\\r\\n".encode())
        return await reader.read()
    finally:
        writer.close()

async def compute_score(solution_str, port):
    match solution_str:
        case "timeout":
            async with asyncio.timeout(0.2):
                await ask(port, "slow")
        case "wait_for": await asyncio.wait_for(ask(port, "slow"), 0.2)
        case "own":
            async with asyncio.timeout(0.05):
                await asyncio.sleep(5)
        case "group":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ask(1, "7"))
                tasks.create_task(ask(port, "slow"))
        case "bug":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ask(port, "slow"))
                tasks.create_task(ask(None.port, "7"))
"""


def test_limits_and_groups_of_a_function_say_whose_failure_it_was(tmp_path: Path, grader: Grader) -> None:
    config = config_of(tmp_path, OWN_LIMITS, kwargs={"port": grader.server_port})
    outcomes = score_all(config, ["timeout", "wait_for", "own", "group", "bug"])
    kinds = ["infrastructure", "infrastructure", "error", "infrastructure", "error"]
    assert [outcome.kind for outcome in outcomes] == kinds
    assert "raised TimeoutError" in outcomes[2].error
    assert "ConnectionRefusedError" in outcomes[3].error
    assert "raised AttributeError: 'NoneType' object has no attribute 'port'" in outcomes[4].error


def test_close_ends_calls_that_wait(tmp_path: Path) -> None:
    source = """
        import asyncio
        async def compute_score(solution_str):
            await asyncio.sleep(60)
    """

    async def run() -> list[Outcome]:
        pool = RewardPool(config_of(tmp_path, source, timeout_s=50.0))
        await pool.start()
        tasks = [asyncio.create_task(pool.score(make_prompt(), make_trajectory(), "1")) for _ in range(40)]
        await asyncio.sleep(0.2)
        await pool.close()
        return await asyncio.gather(*tasks)

    outcomes = asyncio.run(run())
    assert {(outcome.kind, outcome.error) for outcome in outcomes} == {
        ("infrastructure", "not scored: the reward pool was closed")
    }
    assert not reward_processes()


def retried(folder: Path, grader: Grader, **fields: Any) -> tuple[Outcome, list[float]]:
    """The outcome of an answer whose grader is down, and the waits between the requests for it."""
    config = config_of(
        folder, GRADER, kwargs={"port": grader.server_port},
        on_failure=OnFailureConfig(infrastructure="retry"), **fields,
    )  # fmt: skip
    (outcome,) = score_all(config, ["down"])
    times = [when for _, when in grader.asked]
    return outcome, [after - before for before, after in itertools.pairwise(times)]


def test_retries_of_a_service_that_is_not_there_wait_longer_each_time(tmp_path: Path, grader: Grader) -> None:
    outcome, waits = retried(tmp_path, grader, retries=2)
    assert outcome.kind == "infrastructure"
    first, second = waits
    # 0.5 s and 1 s, half of each left to chance; an answer takes 0.05 s.
    assert 0.25 <= first < 0.9
    assert 0.5 <= second < 1.4


def test_pauses_of_retries_end_with_the_time_limit_of_a_call(tmp_path: Path, grader: Grader) -> None:
    outcome, waits = retried(tmp_path, grader, retries=8, timeout_s=0.6)
    assert (outcome.kind, len(waits)) == ("infrastructure", 8)
    assert sum(waits) < 0.6 + 8 * 0.2
