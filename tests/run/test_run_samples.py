"""The sample store: typed columns, whole files, and values that come back as they went in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from strop.run import RunError
from strop.run.samples import SampleStore, reading
from strop.run.samples.columns import COLUMNS, GROUP_ROWS
from strop.run.samples.reading import MAX_VALUES, MEMORY_SHARE

FULL: dict[str, Any] = {
    "id": "e0-000003/1", "uid": "e0-000003", "sample_index": 1, "data_source": "gsm8k", "prompt": "2+2?",
    "response": "4 \u2713", "ground_truth": {"answer": 4},
    "prompt_ids": (5, 6), "response_ids": np.array([7, 8]),
    "response_mask": (True, False), "rollout_log_probs": (-0.5, 0.0), "versions": (3, -1), "score": 1.0,
    "old_log_probs": [-0.5, 0.0], "entropys": [1.5, 0.0], "advantages": [0.75, 0.0],
    "outcome": "score", "error": "", "reward_parts": {"acc": 1.0, "bad": float("nan")}, "advantage": 0.7071,
    "fate": "trained", "fate_reason": "", "stop_reason": "stop",
    "num_turns": 2, "timings": {"generate_s": 0.25}, "agent_name": "tool_agent", "messages": [{"role": "assistant"}],
    "agent_facts": {"tool_rewards": [0.5]}, "earlier_sequences": [{"prompt_ids": [1], "response_ids": [2]}],
    "turn_rewards": [[1, 0.5]], "stands_alone": True, "anchor": "hall", "dataset_row": "[{}]", "row_prompt_ids": [5],
}  # fmt: skip


def row(sample_id: str, **values: Any) -> dict[str, Any]:
    uid, index = sample_id.split("/")
    return {"id": sample_id, "uid": uid, "sample_index": int(index), **values}


def test_a_full_row_comes_back_with_every_value(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "samples")
    path = store.write(12, [FULL])
    assert path.name == "step-000012.parquet"
    expected = FULL | {
        "step": 12, "prompt_ids": [5, 6], "response_ids": [7, 8], "response_mask": [True, False],
        "rollout_log_probs": [-0.5, 0.0], "versions": [3, -1], "reward_parts": {"acc": 1.0, "bad": "nan"},
    }  # fmt: skip
    assert store.read(12) == [expected]


def test_columns_have_one_type_in_every_file_also_when_empty(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    schemas = [
        pq.read_schema(store.write(step, rows)) for step, rows in [(1, [FULL]), (2, [row("a/0")]), (3, [])]
    ]
    assert schemas[0] == schemas[1] == schemas[2]
    assert schemas[0].names == list(COLUMNS)
    assert str(schemas[0].field("response_ids").type) == "list<element: int32>"
    assert str(schemas[0].field("ground_truth").type) == "string"


def test_missing_values_are_null(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    store.write(1, [row("a/0", score=None)])
    (found,) = store.read()
    assert found["score"] is None
    assert found["ground_truth"] is None
    assert found["response_ids"] is None


def test_read_by_step_id_and_split(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    store.write(2, [row("a/0"), row("a/1")])
    store.write(10, [row("b/0")])
    store.write(10, [row("val-000001/0")], split="val")
    assert store.steps() == [2, 10]
    assert [one["id"] for one in store.read()] == ["a/0", "a/1", "b/0"]
    assert [one["id"] for one in store.read(10, split="val")] == ["val-000001/0"]
    with pytest.raises(RunError, match="step 3 has no train samples .*steps 2 to 10 have some"):
        store.read(3)


def test_writing_a_step_again_replaces_it_and_discard_removes_later_steps(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    for step in (1, 2, 3):
        store.write(step, [row("a/0")])
    store.write(3, [row("v/0")], split="val")
    store.write(2, [row("b/0")])
    assert [one["id"] for one in store.read(2)] == ["b/0"]
    store.discard_after(2)
    assert store.steps() == [1, 2]
    assert store.steps(split="val") == []


def test_several_writers_make_one_step(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    second = store.write(7, [row("b/0")], part=1, parts=2)
    assert second.name == "step-000007-00001-of-00002.parquet"
    assert store.steps() == []
    with pytest.raises(RunError, match="step 7 has no train samples"):
        store.read(7)
    store.write(7, [row("a/0"), row("a/1")], part=0, parts=2)
    store.write(7, [row("v/0")], split="val")
    assert store.steps() == [7]
    assert [one["id"] for one in store.read(7)] == ["a/0", "a/1", "b/0"]
    store.discard_after(6)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="part 2 of 2 does not exist"):
        store.write(7, [], part=2, parts=2)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_a_step_written_by_another_number_of_writers_replaces_it(
    tmp_path: Path, before: int, after: int
) -> None:
    store = SampleStore(tmp_path)
    for count, name in ((before, "old"), (after, "new")):
        store.write(0, [row("v/0")], split="val")
        for part in range(count):
            store.write(0, [row(f"{name}{part}/0")], part=part, parts=count)
    assert [one["id"] for one in store.read()] == [f"new{part}/0" for part in range(after)]
    assert len(list(tmp_path.iterdir())) == after + 1


def test_bad_rows_name_sample_and_column(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    with pytest.raises(
        ValueError, match=r"sample 'a/0' has the unknown column 'scor'; did you mean 'score'\?"
    ):
        store.write(1, [row("a/0", scor=1.0)])
    with pytest.raises(ValueError, match="sample 'x' has no uid"):
        store.write(1, [{"id": "x"}])
    with pytest.raises(TypeError, match="score of sample b/0 must be double, but is 'high'"):
        store.write(1, [row("a/0", score=1.0), row("b/0", score="high")])
    with pytest.raises(
        TypeError, match=r"response_ids of sample a/0 must be list<int32>, but is \[4294967296\]"
    ):
        store.write(1, [row("a/0", response_ids=[2**32])])
    with pytest.raises(ValueError, match="lower-case letters only"):
        store.write(1, [], split="../x")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_and_a_damaged_file_give_one_sentence(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(
        RunError, match=r"cannot write the samples of step 1 .*Not a directory; .*save_samples=false"
    ):
        SampleStore(blocked / "samples").write(1, [row("a/0")])
    store = SampleStore(tmp_path / "samples")
    store.write(1, [FULL]).write_bytes(b"PAR1 torn")
    with pytest.raises(RunError, match=r"cannot read the samples in .*step-000001\.parquet"):
        store.read()


def test_a_write_that_the_disk_refuses_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SampleStore(tmp_path)
    store.write(1, [row("a/0")])

    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strop.run.samples.store.fsync_path", refuse)
    with pytest.raises(RunError, match="step 1 to .*: No space left on device; free space"):
        store.write(1, [row("b/0")])
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001.parquet"]
    assert store.read()[0]["id"] == "a/0"


def test_log_probs_of_earlier_sequences_may_be_no_numbers(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    earlier = {"prompt_ids": [1], "response_ids": [2, 3, 4], "rollout_log_probs": [math.nan, -math.inf, -0.5]}
    store.write(1, [{"id": "a/0", "uid": "a", "sample_index": 0, "earlier_sequences": [earlier]}])
    (found,) = store.read(1)[0]["earlier_sequences"]
    assert math.isnan(found["rollout_log_probs"][0])
    assert found["rollout_log_probs"][1:] == [-math.inf, -0.5]


def test_what_is_written_can_be_read_a_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits of a reader are those of 64 rows, or of memory; of a step there is no largest size."""
    monkeypatch.setattr(reading, "MAX_VALUES", 64 * 100)
    monkeypatch.setattr(reading, "_max_bytes", lambda: 64 * 1000)
    store = SampleStore(tmp_path)
    wide = {"response_ids": [7] * 100, "rollout_log_probs": [-1.0] * 100}
    path = store.write(1, [row(f"a/{number}", **wide) for number in range(300)])
    assert pq.ParquetFile(path).metadata.num_row_groups == 5  # 300 / 64
    with pytest.raises(RunError, match="too much for the memory here"):
        store.read(1)  # 300 rows of 800 bytes of tokens each


def test_a_step_of_long_samples_is_within_the_limits() -> None:
    """1,024 samples of 128k tokens: 13 bytes a token (two int32, a float32, and a bool in a bit or a byte)."""
    assert MEMORY_SHARE * 2**35 > 1024 * 2**17 * 13, "on a machine of 32 GiB"
    assert GROUP_ROWS * 2**22 <= MAX_VALUES
