"""What services allow is allowed to the run, however many processes ask: rates, concurrency and money."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_cases import Handler, Service, completion, serve
from reward_cases import make_prompt

from strop.rewards import Outcome, RewardConfig, RewardPool
from strop.rewards.config import OnFailureConfig
from strop.rewards.judges.config import JudgeConfig, ServerConfig
from strop.rewards.judges.cost_budget import CostBudget
from strop.rewards.outcome import remedies
from strop.trainer.config import Config, ResourcesConfig

pytestmark = pytest.mark.timeout(60)
EXCLUDE = OnFailureConfig(infrastructure="exclude")
PRICES = {"price_per_million_input_tokens": 2.0, "price_per_million_output_tokens": 10.0}
COST = 0.0004
"""Of one reply of `completion`: 100 tokens at 2 and 20 tokens at 10 per million."""


def judge(url: str, **fields: Any) -> JudgeConfig:
    return JudgeConfig(**{"base_url": f"{url}/v1", "model": "m", "backoff_s": 0.01, **fields})


def good(handler: Handler, _body: dict[str, Any], _number: int) -> None:
    handler.send(completion('{"score": 0.75}'))


def score_in_pools(config: RewardConfig, count: int, answers: int) -> list[list[Outcome]]:
    """Outcomes of each of `count` pools of one run, which score at the same time."""

    async def one(rank: int) -> list[Outcome]:
        async with RewardPool(config, rank=rank, count=count) as pool:
            asked = (pool.score_text(make_prompt(), f"{rank} {number}") for number in range(answers))
            return list(await asyncio.gather(*asked))

    async def run() -> list[list[Outcome]]:
        return list(await asyncio.gather(*(one(rank) for rank in range(count))))

    return asyncio.run(run())


@given(count=st.integers(1, 40), more=st.integers(0, 100), rate=st.floats(0.01, 1e4))
def test_the_shares_of_all_workers_are_the_limit(count: int, more: int, rate: float) -> None:
    config = judge("http://a", max_concurrent=count + more, requests_per_s=rate)
    shares = [config.share(rank, count) for rank in range(count)]
    places = [share.max_concurrent for share in shares]
    assert sum(places) == count + more
    assert max(places) - min(places) <= 1
    assert sum(share.requests_per_s or 0.0 for share in shares) == pytest.approx(rate)


def test_rate_without_a_limit_has_shares_without_one() -> None:
    assert ServerConfig(url="http://a").share(1, 3).requests_per_s is None


def test_more_workers_than_places_are_refused_with_the_configuration() -> None:
    two = ResourcesConfig(runtime="ray", apart={"rollout": 2})
    for config, name in (
        (RewardConfig(judge=judge("http://a", max_concurrent=1)), "judge"),
        (RewardConfig(server=ServerConfig(url="http://a", max_concurrent=1)), "server"),
    ):
        with pytest.raises(
            ValueError,
            match=rf"reward.{name}.max_concurrent is 1, for the whole run, but 2 rollout workers ask.*raise it to 2",
        ):
            Config(reward=config, resources=two)
        Config(reward=config)


class Counting:
    """Plays a judge and counts the requests under way at the same time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.most, self._now, self._lock = seconds, 0, 0, threading.Lock()

    def __call__(self, handler: Handler, body: dict[str, Any], number: int) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(self.seconds)
        with self._lock:
            self._now -= 1  # before the answer, after which the client may send the next one
        good(handler, body, number)


def test_two_pools_of_a_run_have_no_more_under_way_than_the_run_may() -> None:
    play = Counting(0.05)
    with serve(play) as service:
        config = RewardConfig(judge=judge(service.url, max_concurrent=3))
        outcomes = score_in_pools(config, 2, 6)
    assert [outcome.score for one in outcomes for outcome in one] == [0.75] * 12
    assert play.most == 3


def most_within(service: Service, span_s: float) -> int:
    return max(sum(first <= at <= first + span_s for at in service.at) for first in service.at)


def test_two_pools_of_a_run_start_no_more_requests_than_the_run_may() -> None:
    with serve(good) as service:
        score_in_pools(RewardConfig(judge=judge(service.url, requests_per_s=8.0)), 2, 8)
    # A second's worth at once, 8, and the other 8 at 8 per second: the last one is due after a second.
    assert len(service.at) == 16
    assert service.at[-1] - service.at[0] >= 0.9
    assert most_within(service, 0.5) <= 8 + 4 + 1


# ------------------------------------------------------------------ money


def test_nothing_more_is_asked_once_the_money_is_spent() -> None:
    with serve(good) as service:
        config = judge(service.url, max_concurrent=1, max_cost=2.5 * COST, **PRICES)
        (outcomes,) = score_in_pools(RewardConfig(judge=config, on_failure=EXCLUDE), 1, 6)
    assert len(service.requests) == 3
    assert [outcome.kind for outcome in outcomes] == ["score"] * 3 + ["infrastructure"] * 3
    assert outcomes[-1].error == (
        "the judge was not asked: the run has spent 0.0012 of reward.judge.max_cost=0.001; raise it to go on (also "
        "with --resume)"
    )
    assert outcomes[-1].usage["judge/requests"] == 0.0
    assert remedies(outcomes, repair="mend it") == "do what the error says"


def test_a_repeat_is_not_sent_once_the_money_is_spent() -> None:
    def play(handler: Handler, body: dict[str, Any], number: int) -> None:
        if number == 0:
            time.sleep(0.1)
            handler.send({"error": "busy"}, 503)
        else:
            good(handler, body, number)

    with serve(play) as service:
        config = judge(service.url, max_concurrent=2, retries=3, backoff_s=0.4, max_cost=COST, **PRICES)
        (outcomes,) = score_in_pools(RewardConfig(judge=config, on_failure=EXCLUDE), 1, 2)
    assert sorted(outcome.kind for outcome in outcomes) == ["infrastructure", "score"]
    assert len(service.requests) == 2
    (failed,) = (outcome for outcome in outcomes if outcome.kind != "score")
    assert (failed.usage["judge/requests"], failed.usage["judge/retries"]) == (1.0, 0.0)


def test_verdicts_in_the_cache_are_given_without_money(tmp_path: Path) -> None:
    with serve(good) as service:
        config = judge(service.url, max_concurrent=1, max_cost=COST, cache_dir=str(tmp_path), **PRICES)
        for _ in range(2):
            (outcomes,) = score_in_pools(RewardConfig(judge=config, on_failure=EXCLUDE), 1, 1)
            assert outcomes[0].score == 0.75
    assert len(service.requests) == 1


def test_a_server_that_counts_no_tokens_is_asked_once() -> None:
    def play(handler: Handler, _body: dict[str, Any], _number: int) -> None:
        handler.send({"choices": completion('{"score": 1}')["choices"]})

    with serve(play) as service:
        config = judge(service.url, max_concurrent=1, max_cost=1.0, **PRICES)
        (outcomes,) = score_in_pools(RewardConfig(judge=config, on_failure=EXCLUDE), 1, 3)
    assert len(service.requests) == 1
    assert (
        "the judge sends no token counts (`usage`), so reward.judge.max_cost cannot be kept"
        in outcomes[1].error
    )


def test_pools_of_a_run_together_spend_what_is_left_of_its_money() -> None:
    with serve(good) as service:
        # 5 requests' worth, of which the run has spent 1: two for each of the two.
        config = RewardConfig(
            judge=judge(service.url, max_concurrent=2, max_cost=5 * COST, **PRICES), on_failure=EXCLUDE
        )

        async def one(rank: int) -> tuple[list[Outcome], float]:
            async with RewardPool(config, rank=rank, count=2) as pool:
                pool.set_cost({"judge": COST})
                asked = (pool.score_text(make_prompt(), f"{rank} {number}") for number in range(5))
                return list(await asyncio.gather(*asked)), pool.cost()["judge"]

        async def run() -> list[tuple[list[Outcome], float]]:
            return list(await asyncio.gather(one(0), one(1)))

        pools = asyncio.run(run())
    assert len(service.requests) == 4
    for outcomes, spent in pools:
        assert spent == pytest.approx(2 * COST)
        assert "and this worker has used up its share of the rest" in outcomes[-1].error


@given(
    limit=st.floats(0.1, 100.0), count=st.integers(1, 8), costs=st.lists(st.floats(0.001, 3.0), max_size=60)
)
def test_purses_never_start_a_request_beyond_the_limit(limit: float, count: int, costs: list[float]) -> None:
    budgets = [CostBudget(limit, count=count) for _ in range(count)]
    spent, dearest = 0.0, max(costs, default=0.0)
    for number, cost in enumerate(costs):
        if number % 7 == 0:  # a new step: the run says what all have spent
            spent = sum(budget.cost for budget in budgets)
            for budget in budgets:
                budget.set_cost(spent)
        budget = budgets[number % count]
        if not budget.refusal():
            budget.pay(cost)
    # Each may go over its share by the one request that did so.
    assert sum(budget.cost for budget in budgets) <= limit + count * dearest + 1e-9


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_cost": 1.0}, "both prices are 0"),
        ({"max_cost": 0.0, **PRICES}, "max_cost is 0.0, but it needs a finite number above 0 or null"),
        (
            {"max_cost": float("inf"), **PRICES},
            "max_cost is inf, but it needs a finite number above 0 or null",
        ),
    ],
)
def test_limits_of_money_without_a_meaning_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        judge("http://a", **fields)
