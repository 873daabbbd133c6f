"""The loop of a worker that signals may interrupt."""

import asyncio
import contextlib
import gc

import pytest

from strop.utils import call_loop
from strop.utils.call_loop import CallEventLoop, quiet


async def groups_of_samples(ended: list[int]) -> None:
    """As a step is played: a group of groups, of which one sample is hit by a signal."""

    async def sample(number: int) -> None:
        try:
            await asyncio.sleep(0)
            if number == 5:
                raise KeyboardInterrupt  # as a handler does, in whatever task runs
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    async def group(first: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(first, first + 4):
                tasks.create_task(sample(number))

    async with asyncio.TaskGroup() as tasks:
        for first in (0, 4, 8):
            tasks.create_task(group(first))


def test_an_interrupt_in_a_nested_task_ends_all_tasks_of_the_call_and_no_other() -> None:
    ended: list[int] = []
    complaints: list[object] = []
    with contextlib.closing(CallEventLoop()) as runner:
        runner.loop.set_exception_handler(lambda loop, told: complaints.append(told))

        async def begun_earlier() -> asyncio.Task[str]:
            return asyncio.create_task(asyncio.sleep(0.05, "still here"))

        kept = runner.run(begun_earlier())
        with pytest.raises(KeyboardInterrupt):
            runner.run(groups_of_samples(ended))
        assert sorted(ended) == list(range(12))
        assert asyncio.all_tasks(runner.loop) == {kept}

        async def later() -> str:
            return await kept

        assert runner.run(later()) == "still here"
    gc.collect()
    assert complaints == []


async def counting(seen: list[int], turns: int) -> None:
    for number in range(turns):
        await asyncio.sleep(0)
        seen.append(number)


def test_it_is_quiet_when_all_others_wait_for_something_from_outside() -> None:
    seen: list[int] = []

    async def work() -> None:
        tasks = [asyncio.create_task(counting(seen, turns)) for turns in (3, 40)]
        tasks.append(asyncio.create_task(asyncio.sleep(60)))
        await quiet()
        assert len(seen) == 43
        assert [task.done() for task in tasks] == [True, True, False]

    with contextlib.closing(CallEventLoop()) as runner:
        runner.run(work())


def test_a_task_that_never_waits_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_loop, "QUIET_TURNS", 50)
    seen: list[int] = []

    async def work() -> None:
        task = asyncio.create_task(counting(seen, 10**9))
        await quiet()
        assert 49 <= len(seen) <= 51
        task.cancel()

    with contextlib.closing(CallEventLoop()) as runner:
        runner.run(work())
