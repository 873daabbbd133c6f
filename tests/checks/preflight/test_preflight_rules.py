"""The checks before a run, on samples made up for each."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from strop.engines.config import OptimizerConfig
from strop.rewards import Outcome
from strop.trainer.preflight.rules import Agreement, Probe, can_teach, examine
from strop.trainer.preflight.tokens import AnswerEnd, TokenFacts, examine_tokens
from strop.utils.verdict import Check
from strop.workers.reports import EpisodeReport


def report(uid: str, index: int, score: float | None, **changes: Any) -> EpisodeReport:
    outcome = (
        Outcome(kind="error", error="ZeroDivisionError: division by zero")
        if score is None
        else Outcome(kind="score", score=score, parts={"acc": score})
    )
    values: dict[str, Any] = {
        "uid": uid, "sample_index": index, "data_source": "x", "num_prompt_tokens": 5, "num_response_tokens": 10,
        "num_sampled_tokens": 8, "num_turns": 2, "stop_reason": "stop", "outcome": outcome,
    }  # fmt: skip
    return EpisodeReport(**{**values, **changes})


def groups(*scores: list[float | None], **changes: Any) -> list[EpisodeReport]:
    return [report(f"p{i}", j, s, **changes) for i, group in enumerate(scores) for j, s in enumerate(group)]


FACTS = TokenFacts(
    num_prompts=3, num_changed=0, num_double_starts=0, num_without_opening=0, has_opening=True, spelled_out=(),
    end=AnswerEnd("stops"), num_tokens=100, num_embeddings=128, largest_id=99,
)  # fmt: skip
CLOSE = Agreement(num_tokens=48, max_log_prob=1e-6, mean_log_prob=1e-7, mean_prob=1e-7, is_float32=True)


def probe(reports: list[EpisodeReport], **changes: Any) -> Probe:
    values: dict[str, Any] = {
        "tokens": FACTS, "reports": reports, "max_response_tokens": 64, "max_failed_share": 0.2,
        "is_group_relative": True, "agreement": CLOSE, "optim": OptimizerConfig(lr=1e-2),
        "rewards": {r.id: (r.score,) for r in reports if r.score is not None and r.num_sampled_tokens},
    }  # fmt: skip
    return Probe(**{**values, **changes})


def checks(reports: list[EpisodeReport], **changes: Any) -> dict[str, Check]:
    return {check.name: check for check in examine(probe(reports, **changes))}


def test_a_run_that_can_learn_is_fine_and_says_its_numbers() -> None:
    found = checks(groups([1.0, 0.0], [1.0, 1.0], [0.0, 0.0]))
    assert all(check.is_fine and not check.advice for check in found.values())
    # Wilson intervals of one in three: (2 z^2/4 + 1 -+ ...) / (3 + z^2), 6 to 79 % at z = 1.96.
    assert found["signal"].text == (
        "rewards from 0 to 1, mean 0.5; of 3 groups 1 (6 to 79 %) can teach, 1 (6 to 79 %) are solved by every "
        "sample, 1 (6 to 79 %) by none"
    )
    # pass@1 is the mean of 1/2, 1 and 0; pass@2 that of 1, 1 and 0.
    assert found["difficulty"].text.startswith("pass@1 50 % (95 % interval ")
    assert "pass@2 67 %" in found["difficulty"].text
    assert found["loss mask"].text == "48 of 60 response tokens were sampled by the model and are trained"


def test_without_a_verdict_nobody_is_said_to_pass_or_to_fail() -> None:
    """A weighted sum: every answer has the format's 1 and is wrong."""
    sums = [
        dataclasses.replace(
            one, outcome=Outcome(kind="score", score=1.0, parts={"exact": 0.0, "format": 1.0})
        )
        for one in groups([1.0, 1.0], [1.0, 1.0])
    ]
    found = checks(sums)
    assert found["difficulty"].text.startswith("mean reward 1; no pass rate")
    assert found["signal"].text.endswith(
        "of 2 groups 0 (0 to 66 %) can teach; every sample has the same reward, 1"
    )
    assert "the reward does not tell any answers apart" in found["signal"].advice
    cut = [dataclasses.replace(one, stop_reason="length") for one in sums]
    assert "does not tell any answers apart" in checks(cut)["signal"].advice, "longer answers would not help"
    wrong = [
        dataclasses.replace(
            one, outcome=Outcome(kind="score", score=1.0, parts={"acc": False, "format": 1.0})
        )
        for one in sums
    ]
    assert found["difficulty"].text != checks(wrong)["difficulty"].text
    assert checks(wrong)["difficulty"].text.startswith("pass@1 0 %")
    assert "if not, warm the model up" in checks(wrong)["signal"].advice


def test_a_group_without_a_pass_is_solved_by_none_also_where_its_rewards_differ() -> None:
    """Partial credit: of two groups one has two rewards, and in both nobody passes."""
    graded = [
        dataclasses.replace(one, outcome=Outcome(kind="score", score=one.score, parts={"acc": False}))
        for one in groups([0.5, 0.0], [0.25, 0.25])
    ]
    text = checks(graded)["signal"].text
    assert text.endswith(
        "of 2 groups 1 (9 to 91 %) can teach, 0 (0 to 66 %) are solved by every sample, 2 (34 to 100 %) by none"
    )


def far(**changes: Any) -> dict[str, Agreement]:
    return {"agreement": dataclasses.replace(CLOSE, **changes)}


def rate(lr: float, *, name: Any = "adamw", has_adapter: bool = False) -> dict[str, Any]:
    return {"optim": OptimizerConfig(lr=lr, name=name), "has_adapter": has_adapter}


CUT = {"stop_reason": "length"}


@pytest.mark.parametrize(
    ("reports", "changes", "name", "level", "sentence"),
    [
        (groups([0.0, 0.0], [0.0, 0.0]), {}, "signal", "stop", "every advantage would be 0: look at the answers"),
        (groups([1.0, 1.0], [1.0, 1.0]), {}, "signal", "stop", "nothing left to learn: use harder prompts"),
        (groups([0.0, 0.0], [1.0, 1.0]), {}, "signal", "stop", "does not tell the samples of a prompt apart"),
        (groups([0.0, 0.0], **CUT), {}, "signal", "stop", "100 % of the answers are cut before their end"),
        (groups([0.5], [0.5]), {"is_group_relative": False}, "signal", "stop", "every advantage would be 0"),
        (groups([None, None]), {}, "signal", "stop", "look at the errors"),
        (groups([1.0, 0.0], *[[0.0, 0.0]] * 5), {}, "signal", "warn", "few groups can teach"),
        (groups([1.0, 0.0, None]), {}, "scoring", "warn", "mend the reward function"),
        (groups([None] * 9 + [1.0]), {}, "scoring", "stop", "mend the reward function"),
        (groups([1.0, 0.0], **CUT), {}, "length", "warn", "raise data.max_response_tokens"),
        (groups([1.0, 0.0], num_sampled_tokens=0), {}, "loss mask", "stop", "nothing could be trained"),
        (groups([1.0, 0.0]), rate(0.011), "learning rate", "warn", "usual are 1e-6 to 1e-5, 1e-5 to 1e-4 with LoRA"),
        (groups([1.0, 0.0]), rate(0.1), "learning rate", "stop", "that destroys what a trained model has"),
        (groups([1.0, 0.0]), rate(1.0), "learning rate", "stop", "usual are 1e-6 to 1e-5"),
        (groups([1.0, 0.0]), rate(0.05), "learning rate", "warn", "that may destroy what a trained model has"),
        (groups([1.0, 0.0]), rate(0.11, has_adapter=True), "learning rate", "warn", "usual are 1e-5 to 1e-4 with LoRA"),
        (groups([1.0, 0.0]), rate(1.0, has_adapter=True), "learning rate", "stop", "usual are 1e-5 to 1e-4 with LoRA"),
        (groups([1.0, 0.0]), rate(0.02, name="muon"), "learning rate", "warn", "0.02 of other implementations is"),
        (groups([1.0, 0.0]), far(max_log_prob=0.3), "engine", "warn", "algorithm=tis"),
        (groups([1.0, 0.0]), far(mean_prob=0.02, is_float32=False), "engine", "warn", "algorithm=tis"),
        (groups([1.0, 0.0]), far(mean_log_prob=0.6), "engine", "stop", "the two hold other weights"),
        (groups([1.0, 0.0]), far(mean_log_prob=math.nan), "engine", "stop", "the two hold other weights"),
    ],
)  # fmt: skip
def test_what_stands_in_the_way_is_named_with_advice(
    reports: list[EpisodeReport], changes: dict[str, Any], name: str, level: str, sentence: str
) -> None:
    found = checks(reports, **changes)
    assert found[name].level == level
    assert sentence in found[name].advice


def test_a_usual_learning_rate_is_not_spoken_of() -> None:
    for lr, has_adapter in ((1e-6, False), (0.01, False), (1e-4, True), (0.1, True)):
        assert "learning rate" not in checks(groups([1.0, 0.0]), **rate(lr, has_adapter=has_adapter))


def test_in_bfloat16_one_token_may_differ_much() -> None:
    found = checks(groups([1.0, 0.0]), **far(max_log_prob=0.3, is_float32=False))
    assert found["engine"].is_fine
    assert checks(groups([1.0, 0.0]), agreement=None)["engine"].is_fine


def test_what_counts_are_the_rewards_that_are_trained_on() -> None:
    """A reward model or a penalty tells samples apart that the scorer does not, and so do parts taken one by one."""
    same = groups([0.0, 0.0])
    ids = [report.id for report in same]
    assert not can_teach(probe(same))
    assert can_teach(probe(same, rewards={ids[0]: (0.3,), ids[1]: (0.2,)}))
    assert can_teach(probe(same, rewards={ids[0]: (1.0, 1.0, 0.0), ids[1]: (1.0, 0.0, 1.0)}))


@pytest.mark.parametrize(
    ("changes", "name", "level", "sentence"),
    [
        ({"largest_id": 128}, "vocabulary", "stop", "tokenizer and model do not belong together"),
        ({"num_tokens": 130}, "vocabulary", "warn", "have no embedding"),
        ({"num_tokens": 130, "num_embeddings": 0, "largest_id": 129}, "vocabulary", "ok", ""),
        ({"num_changed": 2}, "template", "ok", ""),
        ({"num_double_starts": 1}, "template", "warn", "take it out of one of the two"),
        ({"has_opening": False}, "template", "warn", "`add_generation_prompt`"),
        ({"has_opening": None}, "template", "ok", ""),
        ({"num_without_opening": 3}, "template", "warn", "was it cut off?"),
        (
            {"spelled_out": ("<|im_start|>",)},
            "template",
            "warn",
            "use the template that came with the tokenizer",
        ),
        ({"end": AnswerEnd("runs on", "<|im_end|>")}, "end of answer", "warn", "rollout.stop_token_ids"),
        ({"end": AnswerEnd("nothing")}, "end of answer", "warn", "let the template close an assistant turn"),
        ({"end": AnswerEnd("text", "<eot>")}, "end of answer", "warn", "a token that the tokenizer knows"),
        ({"end": AnswerEnd("unknown")}, "end of answer", "ok", ""),
    ],
)
def test_template_and_vocabulary_are_looked_at_first(
    changes: dict[str, Any], name: str, level: str, sentence: str
) -> None:
    facts = dataclasses.replace(FACTS, **changes)
    found = {check.name: check for check in examine_tokens(facts)}
    assert (found[name].level, found[name].is_fine) == (level, level == "ok")
    assert sentence in found[name].advice
    assert {check.is_fine for key, check in found.items() if key != name} == {True}


def test_without_groups_different_rewards_are_enough() -> None:
    found = checks(groups([1.0], [0.0]), is_group_relative=False)
    assert found["signal"].is_fine
    assert found["signal"].text.endswith("2 different rewards")


def test_a_teacher_teaches_where_all_rewards_are_equal_but_not_where_there_is_no_sample() -> None:
    same = groups([0.0, 0.0], [0.0, 0.0])
    assert checks(same)["signal"].level == "stop"
    found = checks(same, has_teacher=True)["signal"]
    assert found.is_fine
    assert found.text.endswith("; the teacher teaches on every sample")
    assert can_teach(probe(same, has_teacher=True))
    nothing = groups([None, None])
    assert checks(nothing, has_teacher=True)["signal"].level == "stop"
    assert not can_teach(probe(nothing, has_teacher=True))


def test_the_reason_of_failures_is_told() -> None:
    found = checks(groups([1.0, 0.0, None, None]))
    assert "50 % of the samples failed" in found["scoring"].text
    assert "(2): ZeroDivisionError" in found["scoring"].text


def test_rows_beyond_the_tokenizer_are_said_to_be_never_sampled() -> None:
    facts = dataclasses.replace(FACTS, num_unused=28)
    assert checks(groups([1.0, 0.0]), tokens=facts)["vocabulary"].text == (
        "the tokenizer has 100 tokens, the model 128; no text has the last 28 of these, which are never sampled"
    )
