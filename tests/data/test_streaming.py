"""Training prompts that are read and encoded when they are visited."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from references.chat_templates import CHATML, make_tokenizer
from strop.data import DataConfig, PromptDataset, PromptSampler, read_rows
from strop.data.prompt_loader import next_prompts
from strop.data.streaming import StreamedPrompts, open_rows
from strop.data.visit_ids import parse_visit_uid

TOKENIZER = make_tokenizer(CHATML)
FRAME = 2 + 5 + 1 + 1 + 10  # tokens around a user message: see test_prompts.py


def row(number: int, length: int = 3) -> dict[str, Any]:
    return {
        "data_source": "strop/exact",
        "prompt": [{"role": "user", "content": f"{number:03d}".ljust(length, "x")}],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
    }


def config(**changes: Any) -> DataConfig:
    return DataConfig(**{"train_files": ("x.parquet",), "prompts_per_step": 4, "streaming": True, **changes})


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], group: int = 7) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=group)
    return path


ROWS = [row(number) for number in range(40)]


# ---------------------------------------------------------------------------- rows by number


@pytest.mark.parametrize("kind", ["lines", "parquet", "saved", "folder"])
def test_rows_by_number_are_those_that_are_read_at_once(tmp_path: Path, kind: str) -> None:
    cache = tmp_path / "cache"
    if kind == "lines":
        path = write_lines(tmp_path / "a.jsonl", ROWS)
        path.write_text(path.read_text().replace("\n", "\n\n  \n", 3))  # blank lines are no rows
    elif kind == "saved":
        path = tmp_path / "saved"
        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    elif kind == "folder":
        path = tmp_path / "folder"
        path.mkdir()
        write_parquet(path / "train-0.parquet", ROWS[:15])
        write_parquet(path / "train-1.parquet", ROWS[15:])
    else:
        path = write_parquet(tmp_path / "a.parquet", ROWS)
    found = open_rows([path, path], cache)
    assert list(found) == read_rows([path, path]) == ROWS * 2
    assert [found[number]["prompt"] for number in (79, 3, 41, -1)] == [
        (ROWS * 2)[number]["prompt"] for number in (79, 3, 41, -1)
    ]
    assert found[38:42] == (ROWS * 2)[38:42]
    with pytest.raises(IndexError):
        found[80]
    suffixes = [entry.suffix for entry in (cache / "rows").iterdir()] if (cache / "rows").exists() else []
    assert suffixes == {"lines": [".npy"], "parquet": [""], "folder": ["", ""], "saved": []}[kind]


@pytest.mark.parametrize(("name", "write"), [("a.jsonl", write_lines), ("a.parquet", write_parquet)])
def test_a_file_is_indexed_once_and_again_when_it_changed(
    tmp_path: Path, name: str, write: Callable[[Path, Sequence[dict[str, Any]]], Path]
) -> None:
    path, cache = write(tmp_path / name, ROWS[:3]), tmp_path / "cache"
    assert len(open_rows([path], cache)) == 3
    before = {file: file.stat().st_ino for file in (cache / "rows").rglob("*") if file.suffix != ".lock"}
    assert len(open_rows([path], cache)) == 3
    after = {file: file.stat().st_ino for file in (cache / "rows").rglob("*") if file.suffix != ".lock"}
    assert after == before
    write(path, ROWS[:5])
    assert [row["prompt"] for row in open_rows([path], cache)] == [row["prompt"] for row in ROWS[:5]]
    assert len(list((cache / "rows").iterdir())) == 2


def test_what_cannot_be_read_by_row_is_said(tmp_path: Path) -> None:
    listed = tmp_path / "a.json"
    listed.write_text(json.dumps(ROWS[:2]))
    with pytest.raises(ValueError, match="holds one JSON list.*write one object per line"):
        open_rows([listed], tmp_path)
    broken = tmp_path / "b.jsonl"
    broken.write_text('{"x": 1}\n{oh\n')
    found = open_rows([broken], tmp_path)
    with pytest.raises(ValueError, match=r"row 1 of .*b.jsonl is not valid JSON"):
        found[1]
    empty = tmp_path / "c.jsonl"
    empty.write_text("\n")
    with pytest.raises(ValueError, match=r"c.jsonl has no rows"):
        open_rows([empty], tmp_path)
    torn = tmp_path / "d.parquet"
    torn.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        open_rows([torn], tmp_path)


# ---------------------------------------------------------------------------- prompts


def test_a_mark_of_the_byte_order_before_the_first_row_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_text(write_lines(tmp_path / "a.jsonl", ROWS[:3]).read_text(), encoding="utf-8-sig")
    assert list(open_rows([path], tmp_path / "cache")) == read_rows([path]) == ROWS[:3]


def test_parquet_without_rows_or_with_a_type_that_is_not_streamed_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), empty)
    with pytest.raises(ValueError, match=r"empty\.parquet has no rows; write at least one"):
        open_rows([empty], tmp_path / "cache")
    maps = tmp_path / "maps.parquet"
    pairs = pyarrow.array([[("a", "1")]], pyarrow.map_(pyarrow.string(), pyarrow.string()))
    pyarrow.parquet.write_table(pyarrow.table({"extra_info": pairs}), maps)
    with pytest.raises(ValueError, match=r"maps\.parquet has a column that cannot be streamed: .*extra_info"):
        open_rows([maps], tmp_path / "cache")


@pytest.mark.parametrize("limit", [None, 11])
def test_without_long_prompts_the_visits_are_those_of_a_set_that_is_held(limit: int | None) -> None:
    held = PromptDataset(ROWS, TOKENIZER, config(streaming=False, max_train_prompts=limit), "train")
    streamed = StreamedPrompts(ROWS, TOKENIZER, config(max_train_prompts=limit))
    samplers = [PromptSampler(one.row_numbers, 4, 3) for one in (held, streamed)]
    for _ in range(25):  # more than two epochs of 40
        expected, found = (
            next_prompts(one, sampler, 4) for one, sampler in zip((held, streamed), samplers, strict=True)
        )
        assert found == expected
        assert (len(found.prompts), found.skipped) == (4, {})


def test_long_prompts_are_passed_over_and_the_next_visit_takes_their_place() -> None:
    # Rows 0, 5, 10 … are 5 characters longer than the limit allows.
    rows = [row(number, 8 if number % 5 == 0 else 3) for number in range(20)]
    prompts = StreamedPrompts(rows, TOKENIZER, config(max_prompt_tokens=FRAME + 3))
    sampler = PromptSampler(prompts.row_numbers, 4, 0, "in_order")
    steps = [next_prompts(prompts, sampler, 4) for _ in range(4)]
    assert [[prompt.row for prompt in step.prompts] for step in steps] == [
        [1, 2, 3, 4], [6, 7, 8, 9], [11, 12, 13, 14], [16, 17, 18, 19],
    ]  # fmt: skip
    assert [list(step.skipped) for step in steps] == [
        ["e0-000000"], ["e0-000005"], ["e0-000010"], ["e0-000015"],
    ]  # fmt: skip
    assert set(steps[0].skipped.values()) == {f"prompt longer than data.max_prompt_tokens={FRAME + 3}"}
    assert "4 of 20 tried are longer than" in prompts.report()


def test_a_prompt_that_is_too_long_is_visited_once() -> None:
    rows = [row(number, 3 + number % 4) for number in range(8)]
    prompts = StreamedPrompts(rows, TOKENIZER, config(max_prompt_tokens=FRAME + 4))
    sampler = PromptSampler(prompts.row_numbers, 4, 0)
    steps = [next_prompts(prompts, sampler, 4) for _ in range(6)]
    assert [len(step.prompts) for step in steps] == [4] * 6
    skipped = [{parse_visit_uid(uid)[1] for uid in step.skipped} for step in steps]
    assert set().union(*skipped) == {2, 3, 6, 7}
    assert skipped[2:] == [set()] * 4, "both epochs of the first two steps have their visits at once"


def test_when_all_others_are_retired_nothing_is_left_and_nothing_fails() -> None:
    """Two of four rows are too long; the others are retired, as solved ones are, after their first visit."""
    rows = [row(number, 3 + 9 * (number % 2)) for number in range(4)]
    prompts = StreamedPrompts(rows, TOKENIZER, config(max_prompt_tokens=FRAME + 4))
    sampler = PromptSampler(prompts.row_numbers, 2, 0)
    first = next_prompts(prompts, sampler, 2)
    assert sorted(prompt.row for prompt in first.prompts) == [0, 2]
    for row_number in (0, 2):
        sampler.retire(row_number, 0)
    last = next_prompts(prompts, sampler, 2)
    assert last.prompts == []
    assert len(first.skipped) + len(last.skipped) == 2
    assert sampler.is_exhausted


def test_a_set_that_is_resumed_goes_on_with_the_same_prompts() -> None:
    rows = [row(number, 3 + number % 4) for number in range(30)]
    prompts = StreamedPrompts(rows, TOKENIZER, config(max_prompt_tokens=FRAME + 4))
    whole = PromptSampler(prompts.row_numbers, 4, 0)
    steps, curricula = [], []
    for _ in range(9):
        steps.append(next_prompts(prompts, whole, 4))
        curricula.append(whole.curriculum())
    for cut in (1, 4, 7):
        consumed = [uid for step in steps[:cut] for uid in [*(p.uid for p in step.prompts), *step.skipped]]
        later = PromptSampler(prompts.row_numbers, 4, 0)
        later.restore(consumed, whole.state(), curricula[cut - 1])
        assert [next_prompts(prompts, later, 4) for _ in range(9 - cut)] == steps[cut:]


def test_cutting_at_the_visit_is_cutting_before() -> None:
    rows = [row(number, 3 + number % 4) for number in range(8)]
    changes = {"max_prompt_tokens": FRAME + 4, "filter_overlong_prompts": False, "truncation": "left"}
    held = PromptDataset(rows, TOKENIZER, config(streaming=False, **changes), "train")
    streamed = StreamedPrompts(rows, TOKENIZER, config(**changes))
    for number in range(8):
        assert streamed.prompt(number, f"e0-{number:06d}") == held.prompt(number, f"e0-{number:06d}")
    sampler = PromptSampler(streamed.row_numbers, 8, 0, num_epochs=1)
    assert not next_prompts(streamed, sampler, 8).skipped
    assert next_prompts(streamed, sampler, 8).prompts == []


def test_a_set_of_long_prompts_alone_ends_and_does_not_go_on_for_ever() -> None:
    prompts = StreamedPrompts(ROWS, TOKENIZER, config(max_prompt_tokens=5))
    with pytest.raises(ValueError, match=r"none of 4\d visited prompts can be used .*max_prompt_tokens=5"):
        next_prompts(prompts, PromptSampler(prompts.row_numbers, 4, 0), 4)


def test_a_wrong_mapping_and_a_bad_row_are_named() -> None:
    with pytest.raises(ValueError, match="train row 0 has no value for 'question'"):
        StreamedPrompts(ROWS, TOKENIZER, config(prompt_key="question"))
    bad = [*ROWS[:5], {**ROWS[5], "prompt": 7}, *[row(number) for number in range(6, 200)]]
    prompts = StreamedPrompts(bad, TOKENIZER, config())
    with pytest.raises(ValueError, match="train row 5: column 'prompt' holds int 7"):
        prompts.prompt(5, "e0-000005")
    with pytest.raises(ValueError, match=r"train data has no rows"):
        StreamedPrompts([], TOKENIZER, config())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"source_weights": {"a": 2.0}}, "data.source_weights counts the rows"),
        ({"filter_overlong_prompts": False}, "in the middle of a run"),
    ],
)
def test_what_streaming_cannot_do_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        config(**changes)


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(json.dumps(row(number % 1000, 500)) + "\n" for number in range(count)))
        open_rows([path], tmp_path)  # the index is made
        tracemalloc.start()
        try:
            prompts = StreamedPrompts(open_rows([path], tmp_path), TOKENIZER, config(max_prompt_tokens=1000))
            sampler = PromptSampler(prompts.row_numbers, 4, 0, "in_order")
            for _ in range(10):
                next_prompts(prompts, sampler, 4)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(100)  # what is allocated once
    # A row of 500 characters takes more than 1000 bytes as a dictionary; a number in a list takes 40.
    assert (peak(4000) - peak(400)) / 3600 < 250
