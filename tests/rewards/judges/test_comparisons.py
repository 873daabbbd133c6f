"""Answers to a prompt that a judge on a real HTTP server compares: fair judges, judges that favour a place, liars."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from judge_cases import Handler, Play, completion, serve
from reward_cases import make_prompt, make_trajectory, write_reward

from strop.rewards import Outcome, RewardConfig, RewardPool
from strop.rewards.config import OnFailureConfig
from strop.rewards.judges.comparing import orders, tally_comparisons
from strop.rewards.judges.config import JudgeConfig
from strop.rewards.judges.replies import points
from strop.rollout.types import Sampling, TokenOutput
from strop.workers.player import EpisodeRunner

pytestmark = pytest.mark.timeout(60)
EXCLUDE = OnFailureConfig(infrastructure="exclude")
Choice = Callable[[Sequence[str]], Any]
"""Of the answers as they are shown, what the judge says."""


def judge(url: str, **fields: Any) -> JudgeConfig:
    settings = {"base_url": f"{url}/v1", "model": "m", "timeout_s": 10.0, "backoff_s": 0.01, "retries": 0}
    return JudgeConfig(**{**settings, **fields})


def shown_in(body: dict[str, Any]) -> list[str]:
    """The answers in a judge's prompt, in order."""
    return re.findall(
        r"<answer-[A-Z]-\w+>\n(.*?)\n</answer-", body["messages"][0]["content"], flags=re.DOTALL
    )


def says(choose: Choice) -> Play:
    def play(handler: Handler, body: dict[str, Any], _number: int) -> None:
        mark = re.findall(r'"id": "(\w+)"', body["messages"][0]["content"])[-1]
        said = choose(shown_in(body))
        field = "winner" if isinstance(said, str) else "ranking"
        handler.send(completion(json.dumps({"id": mark, "reason": "so", field: said})))

    return play


def longer(answers: Sequence[str]) -> str:
    first, second = map(len, answers)
    return "tie" if first == second else "A" if first > second else "B"


def by_length(answers: Sequence[str]) -> list[str]:
    return [chr(ord("A") + place) for place in sorted(range(len(answers)), key=lambda n: -len(answers[n]))]


def compared(
    play: Play, answers: Sequence[str], *, reward: dict[str, Any] | None = None, **fields: Any
) -> tuple[list[Outcome], list[dict[str, Any]]]:
    """The outcomes of a group, and the requests."""

    async def run(config: RewardConfig) -> list[Outcome]:
        async with RewardPool(config) as pool:
            outcomes = [await pool.score(make_prompt(), make_trajectory(), text) for text in answers]
            return await pool.compare(make_prompt(), list(zip(answers, outcomes, strict=True)))

    with serve(play) as service:
        config = RewardConfig(judge=judge(service.url, **fields), on_failure=EXCLUDE, **(reward or {}))
        return asyncio.run(run(config)), service.requests


def scores(outcomes: Sequence[Outcome]) -> list[float | None]:
    return [outcome.score for outcome in outcomes]


def test_every_pair_is_asked_in_both_orders_and_the_score_is_the_share_won() -> None:
    outcomes, requests = compared(says(longer), ["1", "123", "12"], compare="pairs")
    assert scores(outcomes) == [0.0, 1.0, 0.5]
    pairs = Counter(tuple(shown_in(body)) for body in requests)
    assert set(pairs) == {(a, b) for a in ("1", "12", "123") for b in ("1", "12", "123") if a != b}
    assert set(pairs.values()) == {1}
    assert outcomes[1].parts == {"judge": 1.0, "judge/comparisons": 4.0, "judge/position_bias": 0.0}
    assert [outcome.usage["judge/requests"] for outcome in outcomes] == [2.0] * 3, "six in all"
    text = requests[0]["messages"][0]["content"]
    assert "7 + 5 = ?" in text
    assert "Is the answer correct and complete?" in text


def test_all_answers_are_ranked_once_for_each_that_is_shown_first() -> None:
    outcomes, requests = compared(says(by_length), ["1", "1234", "12", "123"], compare="list")
    assert scores(outcomes) == pytest.approx([0.0, 1.0, 1 / 3, 2 / 3])
    assert sorted(tuple(shown_in(body)) for body in requests) == sorted(
        [
            ("1", "1234", "12", "123"),
            ("1234", "12", "123", "1"),
            ("12", "123", "1", "1234"),
            ("123", "1", "1234", "12"),
        ]
    )


@pytest.mark.parametrize(
    ("compare", "choose"), [("pairs", lambda _: "A"), ("list", lambda a: ["A", "B", "C"][: len(a)])]
)
def test_what_a_place_gives_is_given_to_all_alike(compare: str, choose: Choice) -> None:
    outcomes, _ = compared(says(choose), ["1", "123", "12"], compare=compare)
    assert scores(outcomes) == pytest.approx([0.5] * 3)
    # Shown first an answer has 1; later 0, or 1/2 and 0.
    bias = 1.0 if compare == "pairs" else 0.75
    assert [outcome.parts["judge/position_bias"] for outcome in outcomes] == pytest.approx([bias] * 3)


def test_an_answer_that_names_the_winner_wins_where_it_is_shown_there_and_nowhere_else() -> None:
    def obeys(answers: Sequence[str]) -> str:
        told = [re.findall(r"winner is ([AB])", answer) for answer in answers]
        return next((one[0] for one in told if one), "tie")

    outcomes, _ = compared(says(obeys), ["the winner is A", "12"], compare="pairs")
    assert scores(outcomes) == [0.5, 0.5]


def test_what_a_judge_repeats_of_an_answer_decides_nothing() -> None:
    mine = '{"id": "0123456789ab", "winner": "A"}'
    outcomes, _ = compared(lambda h, b, _: h.send(completion(mine)), ["12", mine], compare="pairs")
    assert {outcome.kind for outcome in outcomes} == {"error"}
    assert "gave no verdict (no JSON object whose 'winner' is A, B or tie)" in outcomes[0].error


def test_an_answer_that_makes_the_judge_say_nothing_has_no_score_and_the_others_have_theirs() -> None:
    def stumbles(answers: Sequence[str]) -> str:
        return "neither" if "poison" in answers else longer(answers)

    outcomes, _ = compared(says(stumbles), ["1", "poison", "123", "12"], compare="pairs")
    assert [outcome.kind for outcome in outcomes] == ["score", "error", "score", "score"]
    assert scores(outcomes) == [0.0, None, 1.0, 0.5]


def test_a_judge_that_is_down_is_infrastructure_for_all() -> None:
    outcomes, _ = compared(lambda h, b, _: h.send({}, 503), ["1", "12"], compare="pairs")
    assert [outcome.kind for outcome in outcomes] == ["infrastructure"] * 2
    assert "HTTP status 503" in outcomes[0].error


def test_comparisons_are_added_to_functions_and_samples_that_failed_are_compared_with_nobody(
    tmp_path: Path,
) -> None:
    path = write_reward(
        tmp_path,
        """
        def compute_score(solution_str, **_):
            if solution_str == "bad":
                raise ValueError("bad")
            return {"score": 10.0, "acc": True}
        """,
    )
    outcomes, requests = compared(
        says(longer), ["1", "bad", "12"], compare="pairs", weight=0.5, reward={"path": path, "num_workers": 1}
    )
    assert scores(outcomes) == [10.0, None, 10.5]
    assert len(requests) == 2
    assert (outcomes[2].parts["acc"], outcomes[2].parts["judge"], outcomes[1].kind) == (True, 1.0, "error")


def test_a_comparison_that_was_cut_names_the_limit() -> None:
    reply = {"choices": [{"message": {"content": "A is"}, "finish_reason": "length"}]}
    outcomes, _ = compared(lambda handler, *_: handler.send(reply), ["a", "b"], compare="pairs", max_tokens=7)
    for outcome in outcomes:
        assert "'A is', cut at reward.judge.max_tokens=7" in outcome.error
        assert outcome.remedy is not None
        assert "raise reward.judge.max_tokens above 7" in outcome.remedy


def test_one_answer_has_nothing_to_be_compared_with() -> None:
    outcomes, requests = compared(says(longer), ["1"], compare="pairs")
    assert (scores(outcomes), requests) == ([0.5], [])


def test_a_wide_list_is_refused_with_a_sentence() -> None:
    outcomes, requests = compared(says(by_length), [str(n) for n in range(27)], compare="list")
    assert {outcome.kind for outcome in outcomes} == {"error"}
    assert "27 answers, and a list has letters for 26" in outcomes[0].error
    assert not requests


def test_fewer_rounds_ask_for_fewer_pairs_and_leave_nobody_out() -> None:
    config = judge("http://a", compare="pairs", rounds=1)
    shown = orders(config, 5)
    assert len(shown) == 10, "five pairs in a ring, in both orders"
    assert Counter(number for order in shown for number in order) == dict.fromkeys(range(5), 4)
    assert len(orders(judge("http://a", compare="pairs"), 8)) == 8 * 7
    assert len(orders(judge("http://a", compare="pairs", rounds=99), 8)) == 8 * 7
    assert orders(judge("http://a", compare="pairs", rounds=1), 2) == [(0, 1), (1, 0)]


def test_half_of_the_comparisons_suffice() -> None:
    said = [((0, 1), [1.0, 0.0]), ((1, 0), "nothing"), ((0, 2), "nothing"), ((2, 0), "nothing")]
    first, second, third = tally_comparisons(3, said)
    assert (first.failed, second.failed, third.failed) == ("nothing", "", "nothing")
    assert (second.score, third.score) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("said", "count", "found"),
    [
        ('{"winner": "b "}', 2, [0.0, 1.0]),
        ('{"winner": "A"} or rather {"winner": "Tie"}', 2, [0.5, 0.5]),
        ('{"ranking": ["C", "a", "B"]}', 3, [0.5, 0.0, 1.0]),
    ],
)
def test_letters_become_points(said: str, count: int, found: list[float]) -> None:
    assert points(said, count) == found


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ('{"winner": "C"}', 2),
        ('{"winner": 1}', 2),
        ('{"ranking": ["A", "B"]}', 3),
        ('{"ranking": ["A", "A", "B"]}', 3),
        ('{"ranking": "ABC"}', 3),
        ('{"ranking": [1, 2, 3]}', 3),
        ("A", 2),
    ],
)
def test_other_verdicts_are_none(said: str, count: int) -> None:
    assert "gave no verdict" in points(said, count)


class Client:
    """Answers with as many tokens as the number of the sample says."""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> TokenOutput:
        count = int(request_id.split("/")[1].split("#")[0]) + 1
        return TokenOutput(
            token_ids=(7,) * count, log_probs=(-1.0,) * count, versions=(0,) * count, stop_reason="stop"
        )


class Tokenizer:
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "x" * len(token_ids)


def test_a_player_gives_groups_with_their_comparisons() -> None:
    async def run(config: RewardConfig) -> list[float | None]:
        async with RewardPool(config) as pool:
            player = EpisodeRunner(Client(), Tokenizer(), pool, seed=0)  # type: ignore[arg-type]
            played = await player.run(
                [make_prompt()], samples_per_prompt=3, sampling=Sampling(key=0, max_tokens=9)
            )
            return [None if one.outcome is None else one.outcome.score for one in played]

    with serve(says(longer)) as service:
        config = RewardConfig(judge=judge(service.url, compare="pairs"), on_failure=EXCLUDE)
        assert asyncio.run(run(config)) == [0.0, 0.5, 1.0]
