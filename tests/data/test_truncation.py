"""Cutting prompts to the limit, and the cache of their token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from references.chat_templates import CHATML, make_tokenizer
from strop.data import DataConfig, PromptDataset, prompts
from strop.data.cache import prompts as kept_prompts
from strop.data.prompts import Side, truncate


@pytest.mark.parametrize(
    ("side", "limit", "expected"),
    [
        ("left", 3, [2, 3, 4]),
        ("right", 3, [0, 1, 2]),
        ("middle", 3, [0, 3, 4]),
        ("middle", 4, [0, 1, 3, 4]),
        ("left", 5, [0, 1, 2, 3, 4]),
        ("middle", 1, [4]),
    ],
)
def test_what_stays_of_five_tokens(side: Side, limit: int, expected: list[int]) -> None:
    assert truncate(range(5), limit, side) == expected


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", [2, 3, 6, 7]), ("right", [0, 1, 2, 3]), ("middle", [0, 2, 3, 7])],
)
def test_spans_stay_whole(side: Side, expected: list[int]) -> None:
    # Tokens 2 and 3 are an image; of the text 0 1 4 5 6 7 two tokens may stay.
    assert truncate(range(8), 4, side, spans=[(2, 4)]) == expected


def test_spans_longer_than_the_limit_are_an_error() -> None:
    with pytest.raises(ValueError, match="the media of the prompt take 4 tokens, over the limit of 3"):
        truncate(range(6), 3, "left", spans=[(1, 5)])


@given(
    length=st.integers(0, 30), limit=st.integers(1, 30), start=st.integers(0, 30), size=st.integers(0, 5),
    side=st.sampled_from(["left", "right", "middle"]),
)  # fmt: skip
def test_order_and_spans_survive_any_cut(length: int, limit: int, start: int, size: int, side: Side) -> None:
    span = (min(start, length), min(start + size, length))
    if span[1] - span[0] > limit:
        return
    kept = truncate(range(length), limit, side, spans=[span])
    assert len(kept) == min(length, limit)
    assert kept == sorted(set(kept))
    assert set(range(*span)) <= set(kept)


def row(text: str, **changes: Any) -> dict[str, Any]:
    return {"prompt": text, "data_source": "s", "answer": "x", **changes}


def config(**changes: Any) -> DataConfig:
    return DataConfig(**{"ground_truth_key": "answer", "filter_overlong_prompts": False, **changes})


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_long_prompts_are_cut_and_counted(side: Side) -> None:
    tokenizer = make_tokenizer(CHATML)
    rows = [row("ab"), row("0123456789")]
    dataset = PromptDataset(rows, tokenizer, config(truncation=side, max_prompt_tokens=18), "train")
    ids = list(dataset.prompt(1, "e0-000001").token_ids)
    whole = [
        "<|im_start|>", *"user\n", *"0123456789", "<|im_end|>", "\n", "<|im_start|>", *"assistant\n"
    ]  # fmt: skip
    tokens = {"left": whole[-18:], "right": whole[:18], "middle": whole[:9] + whole[-9:]}[side]
    assert ids == tokenizer.convert_tokens_to_ids(tokens)
    place = {"left": "on the left", "right": "on the right", "middle": "in the middle"}[side]
    assert dataset.report() == (
        f"train: 2 prompts of 18 to 18 tokens (median 18); cut 2 (100.0 %) {place} to data.max_prompt_tokens=18"
    )


def test_the_tools_of_a_row_count() -> None:
    template = "{% for t in tools or [] %}[{{ t['name'] }}]{% endfor %}" + CHATML
    rows = [row("ab"), row("ab", tools=[{"name": "add"}])]
    settings = config(filter_overlong_prompts=True, max_prompt_tokens=21)
    dataset = PromptDataset(rows, make_tokenizer(template), settings, "train")
    assert dataset.row_numbers == (0,)


def test_cutting_what_is_dropped_before_is_refused() -> None:
    with pytest.raises(
        ValueError, match="data.truncation=left cuts long prompts, but data.filter_overlong_prompts=true"
    ):
        config(truncation="left", filter_overlong_prompts=True)


def test_training_rows_are_spread_over_the_files() -> None:
    rows = [row("abc") for _ in range(10)]
    tokenizer = make_tokenizer(CHATML)
    dataset = PromptDataset(rows, tokenizer, config(max_train_prompts=4), "train")
    assert dataset.row_numbers == (0, 2, 5, 7)
    assert dataset.report().endswith("; 6 left out by data.max_train_prompts=4")
    assert len(PromptDataset(rows, tokenizer, config(max_train_prompts=4), "val")) == 10
    with pytest.raises(ValueError, match="data.max_train_prompts is 0"):
        config(max_train_prompts=0)


def test_data_sources_of_the_rows_that_are_kept() -> None:
    rows = [row("a"), row("b" * 40), row("c", data_source=None)]
    settings = config(filter_overlong_prompts=True, max_prompt_tokens=30, default_data_source="d")
    assert PromptDataset(rows, make_tokenizer(CHATML), settings, "train").data_sources == {0: "s", 2: "d"}


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """Settings with a cache that keeps also small sets."""
    monkeypatch.setattr(kept_prompts, "MIN_CACHED_ROWS", 2)
    return config(cache_dir=str(tmp_path))


def kept_files(settings: DataConfig) -> list[Path]:
    return sorted(Path(settings.cache_dir).rglob("*.*"))


def token_ids(dataset: PromptDataset) -> list[tuple[int, ...]]:
    return [dataset.prompt(row, "e0-000000").token_ids for row in dataset.row_numbers]


def test_a_second_run_takes_the_token_ids_of_the_first(
    cached: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, tokenizer = [row("ab"), row("c"), row("d" * 20)], make_tokenizer(CHATML)
    first = token_ids(PromptDataset(rows, tokenizer, cached, "train"))
    (file,) = kept_files(cached)
    assert file.suffix == ".npz"
    monkeypatch.setattr(prompts, "encode_all", None)  # nothing is encoded any more
    assert token_ids(PromptDataset(rows, tokenizer, cached, "train")) == first
    smaller = config(cache_dir=cached.cache_dir, max_prompt_tokens=25, filter_overlong_prompts=True)
    assert token_ids(PromptDataset(rows, tokenizer, smaller, "train")) == first[:2]


@pytest.mark.parametrize("changed", ["row", "tools", "options", "template", "tokenizer"])
def test_all_that_ids_depend_on_is_in_the_key(cached: DataConfig, changed: str) -> None:
    rows, tokenizer, settings = [row("ab"), row("c")], make_tokenizer(CHATML), cached
    PromptDataset(rows, tokenizer, settings, "train")
    if changed == "row":
        rows[1] = row("d")
    elif changed == "tools":
        rows[1] = row("c", tools=[{"name": "add"}])
    elif changed == "options":
        settings = config(cache_dir=cached.cache_dir, chat_template_kwargs={"mood": "calm"})
    elif changed == "template":
        tokenizer = make_tokenizer(CHATML + " ")
    else:
        tokenizer = make_tokenizer(CHATML, merges=[("a", "b")])
    PromptDataset(rows, tokenizer, settings, "train")
    assert len(kept_files(cached)) == 2


def test_a_damaged_cache_is_made_again(cached: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    rows, tokenizer = [row("ab"), row("c")], make_tokenizer(CHATML)
    first = token_ids(PromptDataset(rows, tokenizer, cached, "train"))
    (file,) = kept_files(cached)
    whole = file.read_bytes()
    for contents in (b"", whole[: len(whole) // 2], b"PK\x03\x04 nonsense"):
        file.write_bytes(contents)
        assert token_ids(PromptDataset(rows, tokenizer, cached, "train")) == first
        assert "cannot be read and are made again" in caplog.text
        caplog.clear()
    assert kept_files(cached) == [file]


def test_templates_with_the_date_and_folders_that_cannot_be_written(
    cached: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [row("ab"), row("c")]
    dated = make_tokenizer("{{ strftime_now('%d') }}" + CHATML)
    PromptDataset(rows, dated, cached, "train")
    assert kept_files(cached) == []
    (tmp_path / "file").write_text("")
    settings = config(cache_dir=str(tmp_path / "file"))
    assert len(PromptDataset(rows, make_tokenizer(CHATML), settings, "train")) == 2
    assert "are not kept for the next run" in caplog.text
