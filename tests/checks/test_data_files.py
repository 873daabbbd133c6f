"""What `strop data check` finds out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from references.chat_templates import CHATML, make_tokenizer
from strop.data import DataConfig
from strop.data.file_check import Bin, examine, histogram, overlap


def row(text: str, **changes: Any) -> dict[str, Any]:
    return {"prompt": text, "data_source": "s", "answer": "x", **changes}


def config(**changes: Any) -> DataConfig:
    return DataConfig(**{"ground_truth_key": "answer", **changes})


def test_every_problem_is_counted_not_only_the_first() -> None:
    rows = [
        row("ab"), row("c", answer=None), {"question": "q"}, row("d", answer=None), row("e", prompt=[]),
        row("f", images=["x.png"]), row("g" * 30, data_source="t"),
    ]  # fmt: skip
    report = examine(rows, make_tokenizer(CHATML), config(max_prompt_tokens=30))
    assert [(one.name, one.num_missing, one.first_missing) for one in report.columns] == [
        ("prompt", 1, 2),
        ("data_source", 1, 2),
        ("answer", 3, 1),
    ]
    assert report.num_malformed == 2
    assert report.malformed[0].startswith("row 4: column 'prompt' holds list []")
    assert report.malformed[1].startswith("row 5 has 0 placeholders <image> in its messages, but 1 images")
    # The template adds 19 tokens.
    assert report.lengths == {0: 21, 1: 20, 3: 20, 6: 49}
    assert (report.num_over, report.sources) == (1, {"s": 5, "t": 1})
    problems = report.problems(config())
    assert len(problems) == 4
    assert problems[2].startswith(
        "3 of 7 rows have no value for 'answer', the first is row 1 (the right answer; map"
    )
    assert problems[3].endswith("; and 1 more rows")


def test_lengths_are_a_problem_only_where_a_run_would_stop() -> None:
    rows = [row("ab"), row("c" * 20)]
    tokenizer = make_tokenizer(CHATML)

    def problems(**changes: Any) -> list[str]:
        settings = config(**changes)
        return examine(rows, tokenizer, settings).problems(settings)

    assert problems(max_prompt_tokens=30) == []
    assert problems(max_prompt_tokens=30, filter_overlong_prompts=False, truncation="left") == []
    (error,) = problems(max_prompt_tokens=30, filter_overlong_prompts=False)
    assert error.startswith("1 of 2 prompts are longer than data.max_prompt_tokens=30; raise it to 39")
    (none,) = problems(max_prompt_tokens=20)
    assert none == "every prompt is longer than data.max_prompt_tokens=20; raise it to at least 21"


def test_prompts_are_shown_with_their_special_tokens_and_as_they_are_cut() -> None:
    rows = [row("bb"), row("a"), row("c" * 9), row("ddd")]
    report = examine(rows, make_tokenizer(CHATML), config())
    assert [(shown.row, shown.why) for shown in report.shown] == [
        (0, "first"),
        (2, "longest"),
        (1, "another"),
    ]
    assert report.shown[0].text == "<|im_start|>user\nbb<|im_end|>\n<|im_start|>assistant\n"
    cut = config(filter_overlong_prompts=False, truncation="left", max_prompt_tokens=13)
    longest = examine(rows, make_tokenizer(CHATML), cut).shown[1]
    assert (longest.why, longest.num_tokens) == ("longest, cut (left) from 28 tokens", 13)
    assert longest.text == "<|im_end|>\n<|im_start|>assistant\n"


def test_repeats_and_overlap_see_through_white_space() -> None:
    rows = [
        row("a b"),
        row("c"),
        row("a  b\n"),
        row("a b", prompt=[{"role": "user", "content": " a b"}]),
        row("A b"),
    ]
    assert examine(rows, make_tokenizer(CHATML), config()).repeats == {2: 0, 3: 0}
    others = [row("x"), row("a\tb"), row("c"), {"prompt": None}]
    assert overlap(rows, others, config()) == {1: 0, 2: 1}
    assert overlap(rows, [row("x")], config()) == {}


def test_bins_have_a_round_width() -> None:
    assert histogram([]) == []
    assert histogram([7, 7, 9]) == [
        Bin(low=7, high=7, count=2),
        Bin(low=8, high=8, count=0),
        Bin(low=9, high=9, count=1),
    ]
    # 25 to 118: with a width of 10 there are ten bins, 20-29 to 110-119.
    bins = histogram([25, 30, 118])
    assert (bins[0], bins[-1], len(bins)) == (
        Bin(low=20, high=29, count=1),
        Bin(low=110, high=119, count=1),
        10,
    )


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=30))
def test_every_length_is_in_one_bin(lengths: list[int]) -> None:
    bins = histogram(lengths)
    assert len(bins) <= 10
    assert sum(one.count for one in bins) == len(lengths)
    assert all(one.count == sum(one.low <= length <= one.high for length in lengths) for one in bins)
    widths = {one.high - one.low + 1 for one in bins}
    assert len(widths) == 1
    assert str(widths.pop()).rstrip("0") in {"1", "2", "5"}


def test_a_template_that_loops_is_met_once_and_not_for_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.utils.chat_template.process.DEADLINE_S", 1.0)
    tokenizer = make_tokenizer(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="loops, or writes far more than it is given, and was stopped"):
        examine([row("a"), row("b")], tokenizer, config())


def test_a_tokenizer_without_chat_template_is_refused() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        examine([row("a")], make_tokenizer(None), config())
