"""Rows of recorded tokens, which of them are kept, what a teacher said of them, and which turns are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from references.chat_templates import CHATML, FORGETFUL, LLAMA3, MARKED, make_tokenizer
from strop.data import SftDataConfig, SftDataset
from strop.data.sft.config import SftConfig, SftDistillationConfig, SftKeepConfig
from strop.data.sft.rows import read_sft_rows
from strop.run import RunError
from strop.trainer.sft.trainer import checked_top_k, make_sft_batch

TOKENIZER = make_tokenizer(CHATML)


def sampled(
    answer: list[int], score: float | None = 1.0, prompt: tuple[int, ...] = (5, 6), **more: Any
) -> Any:
    return {"prompt_ids": list(prompt), "response_ids": answer, "score": score, **more}


def kept(rows: list[Any], **keep: Any) -> list[int]:
    dataset = SftDataset(rows, TOKENIZER, SftDataConfig(keep=SftKeepConfig(**keep)))
    return [dataset[number].row for number in range(len(dataset))]


# --------------------------------------------------------------------------------------------------- tokens


def test_tokens_are_trained_as_they_were_sampled() -> None:
    turns = sampled([7, 8, 9], response_mask=[True, False, True])
    dataset = SftDataset([turns, sampled([10])], TOKENIZER, SftDataConfig())
    assert dataset[0].token_ids == (5, 6, 7, 8, 9)
    assert dataset[0].loss_mask == (False, False, True, False, True)
    assert (dataset[1].token_ids, dataset[1].loss_mask) == ((5, 6, 10), (False, False, True))
    assert SftDataset([sampled([7])], make_tokenizer(""), SftDataConfig())[0].token_ids == (5, 6, 7)


def test_a_sample_whose_history_was_rewritten_is_all_its_sequences() -> None:
    earlier = [{"prompt_ids": [1, 2], "response_ids": [3], "response_mask": [True]}]
    rows = [sampled([7], earlier_sequences=earlier), sampled([8], response_mask=[False]), sampled([9])]
    dataset = SftDataset(rows, TOKENIZER, SftDataConfig())
    assert [dataset[i].token_ids for i in range(len(dataset))] == [(1, 2, 3), (5, 6, 7), (5, 6, 9)]
    assert [dataset[i].row for i in range(len(dataset))] == [0, 0, 2]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (sampled([7, 10**6]), r"train row 0: response_ids has the id 1000000, .* those of another model"),
        (sampled([7], prompt=(-1,)), "prompt_ids has the id -1"),
        (sampled([7], prompt=()), "0 prompt_ids, 1 response_ids and 1 values"),
        (sampled([7], response_mask=[True, True]), "1 response_ids and 2 values of response_mask"),
        (sampled("text"), "response_ids is 'text'; it must be a list of token ids"),
        (sampled([7], response="something else"), "its tokens say .* but its text is 'something else': they are"),
        (sampled([7], teacher_ids=[[1]]), "teacher_ids and teacher_logprobs"),
        (sampled([7], teacher_ids=[[1, 2]], teacher_logprobs=[[-1.0]]), r"shapes \[1, 2\] and \[1, 1\]; both need"),
        (sampled([7], teacher_ids=[[1, 2]], teacher_logprobs=[[-0.1, -0.1]]), "add up to 1.81"),
        (sampled([7], teacher_ids=[[1, 1]], teacher_logprobs=[[-1.0, -1.0]]), "the same token twice"),
        (sampled([7], teacher_ids=[[10**6]], teacher_logprobs=[[-1.0]]), "ids go from 1000000 to 1000000"),
    ],
)  # fmt: skip
def test_tokens_that_cannot_be_right_are_named(row: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SftDataset([row], TOKENIZER, SftDataConfig())


# ----------------------------------------------------------------------------------------------------- keep


def test_the_best_answers_to_each_prompt_are_kept_once() -> None:
    other = (5, 7)
    rows = [
        sampled([7], 0.5),
        sampled([8], 1.0),
        sampled([8], 1.0),  # says the same as the one before
        sampled([9], 0.2),
        sampled([7], 0.9),  # says the same as the first, and was scored higher
        sampled([9], 0.0, other),
        sampled([8], None, other),
    ]
    assert kept(rows, best=1) == [1, 5]
    assert kept(rows, best=2) == [1, 4, 5]
    assert kept(rows, best=2, repeats=True) == [1, 2, 5]
    assert kept(rows, min_score=0.9) == [1, 4]
    assert kept(rows, min_score=0.2, best=9) == [1, 3, 4]
    said = SftDataset(rows, TOKENIZER, SftDataConfig(keep=SftKeepConfig(best=1))).report()
    assert "2 of 7 rows kept by their scores" in said
    assert len(SftDataset(rows, TOKENIZER, SftDataConfig())) == 7


def test_conversations_with_a_score_are_kept_by_their_prompt() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "completion": "x", "score": 1},
        {"prompt": "a", "completion": "y", "score": 2},
        {"prompt": "b", "completion": "z", "score": 0.5},
    ]
    assert kept(rows, best=1) == [1, 2]
    asked = {"role": "user", "content": "a"}
    rows = [
        {"messages": [asked, {"role": "assistant", "content": text}], "score": score}
        for text, score in (("x", 0), ("y", 3), ("x", 2))
    ]
    assert kept(rows, best=2) == [1, 2]


def test_what_keep_cannot_choose_by_is_named() -> None:
    with pytest.raises(ValueError, match=r"row 0 has no column 'score', by which sft\.data\.keep chooses"):
        kept([{"prompt_ids": [5], "response_ids": [6]}], best=1)
    with pytest.raises(ValueError, match="has the score 'good', which is no number"):
        kept([sampled([7], score="good")], best=1)  # type: ignore[arg-type]
    bad = [sampled([7], score=score) for score in ("good", 1.0, "bad", "good")]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 of 4 train rows cannot be used") as error:
        kept(bad, best=1)
    assert "rows 0, 3: has the score 'good'" in str(error.value)
    assert "row 2: has the score 'bad'" in str(error.value)
    with pytest.raises(ValueError, match="no train row is kept: .* the highest score is 0.25; lower it"):
        kept([sampled([7], 0.25), sampled([8], None)], min_score=1.0)
    some = [{"prompt": "a", "completion": "b", "score": score} for score in ("good", 1.0, "bad", "good")]
    with pytest.raises(
        ValueError, match="^3 of 4 train rows cannot be used; mend them, or take them out of"
    ) as caught:
        kept(some, best=1)
    good, bad = str(caught.value).splitlines()[1:]
    assert good == "  - rows 0, 3: has the score 'good', which is no number; write one, or null"
    assert bad == "  - row 2: has the score 'bad', which is no number; write one, or null"
    with pytest.raises(ValueError, match=r"sft\.data\.keep\.repeats is true, but nothing is left out"):
        SftKeepConfig(repeats=True)


def test_a_folder_without_samples_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunError, match="holds no training samples to fine-tune on"):
        read_sft_rows([str(tmp_path)])


# -------------------------------------------------------------------------------------------------- teacher

LOGS = {
    "teacher_ids": [[7, 1], [8, 2], [9, 3]],
    "teacher_logprobs": [[-0.5, -2.0], [-0.6, -3.0], [-0.7, -4.0]],
}


def test_a_teachers_word_goes_with_its_tokens_through_every_cut() -> None:
    row = sampled([7, 8, 9], **LOGS)
    for settings, length, ids in (
        ({}, 5, [[7, 1], [8, 2], [9, 3]]),
        ({"max_tokens": 4, "truncation": "right"}, 4, [[7, 1], [8, 2]]),
        ({"max_tokens": 4, "truncation": "left"}, 4, [[7, 1], [8, 2], [9, 3]]),
        ({"max_tokens": 3, "truncation": "left"}, 3, [[8, 2], [9, 3]]),  # 7 is first: nothing predicts it
    ):
        dataset = SftDataset([row], TOKENIZER, SftDataConfig(**settings))
        assert len(dataset[0].token_ids) == length
        batch = make_sft_batch([dataset[0]], with_teacher=True).tensors()
        assert batch["teacher_ids"].values().tolist() == ids
        assert len(batch["responses"].values()) == len(ids) == len(batch["teacher_logprobs"].values())
    masked = SftDataset([sampled([7, 8, 9], response_mask=[0, 1, 1], **LOGS)], TOKENIZER, SftDataConfig())
    assert make_sft_batch([masked[0]], with_teacher=True).tensors()["teacher_ids"].values().tolist() == [
        [8, 2],
        [9, 3],
    ]


def test_rows_without_a_teacher_or_with_different_ones_are_refused() -> None:
    silent = SftDataset([sampled([7])], TOKENIZER, SftDataConfig())
    with pytest.raises(ValueError, match="the rows have no columns teacher_ids and teacher_logprobs"):
        checked_top_k(silent)
    both = [sampled([7, 8, 9], **LOGS), sampled([7], teacher_ids=[[7]], teacher_logprobs=[[-0.1]])]
    with pytest.raises(ValueError, match="row 1 has 1, row 0 has 2; log the same number"):
        checked_top_k(SftDataset(both, TOKENIZER, SftDataConfig()))
    assert checked_top_k(SftDataset(both[:1], TOKENIZER, SftDataConfig())) == 2
    with pytest.raises(
        ValueError, match=r"sft\.distillation\.nll_coef is set, but sft\.distillation\.coef is 0"
    ):
        SftConfig(distillation=SftDistillationConfig(nll_coef=0.5))


# ---------------------------------------------------------------------------------------------------- turns


def turns(*said: tuple[str, str, Any]) -> list[dict[str, Any]]:
    """Role, text and what the message says of its own training; None: nothing."""
    return [{"role": role, "content": text, "loss_mask": mask} for role, text, mask in said]


def trained_text(template: str, messages: list[dict[str, Any]], **settings: Any) -> str:
    tokenizer = make_tokenizer(template)
    one = SftDataset([{"messages": messages}], tokenizer, SftDataConfig(**settings))[0]
    return str(tokenizer.decode([i for i, flag in zip(one.token_ids, one.loss_mask, strict=True) if flag]))


TALK = [("user", "hi", None), ("assistant", "yo", None), ("user", "and?", None), ("assistant", "so on", None)]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MARKED])
def test_the_last_turn_alone_or_those_that_say_so_are_trained(template: str) -> None:
    every = trained_text(template, turns(*TALK))
    assert ("yo" in every, "so on" in every) == (True, True)
    last = trained_text(template, turns(*TALK), trained_turns="last")
    assert ("yo" in last, "so on" in last) == (False, True)
    first = [(role, text, {"yo": 1, "so on": False, "hi": 0}.get(text)) for role, text, _ in TALK]
    named = trained_text(template, turns(*first), trained_turns="last")
    assert ("yo" in named, "so on" in named) == (True, False)
    assert trained_text(template, turns(*((r, t, 0 if t == "yo" else None) for r, t, _ in TALK))) == last


def test_the_last_turn_serves_where_a_template_rewrites_earlier_ones() -> None:
    talk = [("user", "hi", None), ("assistant", "<think>a</think>yo", None), *TALK[2:]]
    with pytest.raises(ValueError, match="not append-only at message 2 of 4"):
        trained_text(FORGETFUL, turns(*talk))
    assert trained_text(FORGETFUL, turns(*talk), trained_turns="last") == "so on<|im_end|>"


def test_a_mask_that_cannot_be_followed_is_named() -> None:
    for changed, sentence in (
        ({0: 1}, r"message 1 \(user\) has loss_mask=1, but only what the assistant says"),
        ({1: "no"}, "message 2 has loss_mask='no'; write true or false, 1 or 0"),
        ({1: 0, 3: 0}, "no message is trained, all say loss_mask=0"),
    ):
        said = [(role, text, changed.get(number)) for number, (role, text, _) in enumerate(TALK)]
        with pytest.raises(ValueError, match=sentence):
            trained_text(CHATML, turns(*said))
    own = [{**message, "train": message["content"] != "yo"} for message in turns(*TALK)]
    for message in own:
        message["train"] = message["train"] and message["role"] == "assistant"
    assert "yo" not in trained_text(CHATML, own, trained_key="train")


@pytest.mark.parametrize("key", ["weight", "loss", "train", "trainable"])
def test_a_message_that_other_programs_would_not_train_is_named(key: str) -> None:
    talk = turns(*TALK)
    talk[1][key] = 0
    with pytest.raises(
        ValueError, match=f"message 2 has {key}=0, and would be trained: set sft.data.trained_key={key}"
    ):
        trained_text(CHATML, talk)
    assert "yo" not in trained_text(CHATML, talk, trained_key=key)
    assert "yo" not in trained_text(CHATML, talk, trained_turns="last")
    talk[1][key] = 1
    assert "yo" in trained_text(CHATML, talk)
