"""data.dataset_class, and the class and collate function that users of verl subclass."""

from __future__ import annotations

import copy
import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from references.chat_templates import CHATML, make_tokenizer
from strop.data import DataConfig, PromptDataset, PromptSampler, RLHFDataset, collate_fn
from strop.data.dataset_class import dataset_settings
from strop.data.dataset_class_config import DatasetClassConfig
from strop.data.loading import load_rows
from strop.data.prompt_loader import next_prompts
from strop.data.streaming import StreamedPrompts

TOKENIZER = make_tokenizer(CHATML)
FRAME = 2 + 5 + 1 + 1 + 10  # tokens around a user message: see test_prompts.py


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "strop/exact",
            "prompt": [{"role": "user", "content": "x" * (1 + number)}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": 100 + number, "tools_kwargs": {"t": {"create_kwargs": {"n": number}}}},
        }
        for number in range(count)
    ]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(6)), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows(6)))
    return tmp_path


def settings(files: Path, source: str = "", name: str = "Mine", **changes: Any) -> DataConfig:
    path = files / "mine.py"
    path.write_text(textwrap.dedent(source))
    return DataConfig(
        train_files=(str(files / "a.parquet"),),
        val_files=(str(files / "a.jsonl"),),
        dataset_class=DatasetClassConfig(path=str(path), name=name),
        **{"prompts_per_step": 2, **changes},
    )


PLAIN = """\
class Mine:
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.files, self.config, self.max_samples = data_files, config, max_samples

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return {
            "raw_prompt": [{"role": "user", "content": f"{i}+{i}"}],
            "data_source": "strop/exact",
            "reward_model": {"ground_truth": str(2 * i)},
            "index": 7 + i,
            "asked_with": [self.files, self.max_samples, self.config.max_prompt_length],
        }
"""


@pytest.mark.parametrize("streaming", [False, True])
def test_a_class_of_ones_own_gives_the_prompts(files: Path, streaming: bool) -> None:
    config = settings(files, PLAIN, streaming=streaming, max_train_prompts=3)
    found = load_rows(config, "train", TOKENIZER)
    make = (
        StreamedPrompts(found, TOKENIZER, config)
        if streaming
        else PromptDataset(found, TOKENIZER, config, "train")
    )
    drawn = next_prompts(make, PromptSampler(make.row_numbers, 2, 0, "in_order"), 2)
    # 4 rows although max_samples says 3: the class decides, and the limit then keeps rows 0, 1 and 2 of 4.
    assert len(make) == 3
    first, second = drawn.prompts
    assert first.messages == ({"role": "user", "content": "0+0"},)
    assert (second.ground_truth, second.data_source, second.extra_info) == ("2", "strop/exact", {"index": 8})
    assert second.columns["asked_with"] == [[str(files / "a.parquet")], 3, 512]
    (val, *_) = load_rows(config, "val", TOKENIZER)
    assert val["asked_with"] == [[str(files / "a.jsonl")], -1, 512]


def test_a_subclass_of_verls_class_works_after_its_import_is_changed(files: Path) -> None:
    config = settings(
        files,
        """\
        from strop.data import RLHFDataset


        class Mine(RLHFDataset):
            def _read_files_and_tokenize(self):
                super()._read_files_and_tokenize()
                self.dataframe = self.dataframe.filter(lambda row: row["reward_model"]["ground_truth"] != "1")

            def __getitem__(self, item):
                row = super().__getitem__(item)
                row["data_source"] = "strop/exact/" + self.config.get("level", "easy")
                row["raw_prompt"] = [{"role": "system", "content": "be brief"}, *row["raw_prompt"]]
                return row
        """,
        max_prompt_tokens=FRAME + 4 + 18,
    )
    data = PromptDataset(load_rows(config, "train", TOKENIZER), TOKENIZER, config, "train")
    # Rows 0, 2 and 3 keep to the limit with the system message, which takes 1 + 7 + 8 + 2 more; row 1 is left out.
    found = [data.prompt(number, f"e0-{number:06d}") for number in data.row_numbers]
    assert [prompt.ground_truth for prompt in found] == ["0", "2", "3"]
    assert found[1].messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "xxx"},
    )
    assert found[1].data_source == "strop/exact/easy"
    assert found[1].extra_info == {"index": 102, "tools_kwargs": {"t": {"create_kwargs": {"n": 2}}}}
    assert not any("dummy_tensor" in prompt.columns for prompt in found)


def test_the_fields_class_says_how_many_rows_it_drops(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"max_prompt_length": FRAME + 4}
    RLHFDataset(str(files / "a.jsonl"), TOKENIZER, config)
    limit = f"data.max_prompt_tokens={FRAME + 4}"
    expected = f"RLHFDataset dropped 2 of 6 rows ({files / 'a.jsonl'}) whose prompt is longer than {limit}"
    assert caplog.messages == [expected]
    caplog.clear()
    RLHFDataset(str(files / "a.jsonl"), TOKENIZER, {"max_prompt_length": FRAME + 6})
    assert not caplog.messages


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_the_fields_class_by_itself(files: Path, name: str) -> None:
    config = {"max_prompt_length": FRAME + 4, "prompt_key": "prompt"}
    data = RLHFDataset(str(files / name), TOKENIZER, config)
    assert len(data) == 4
    row = data[2]
    assert row["raw_prompt"] == [{"role": "user", "content": "xxx"}]
    assert (row["index"], row["interaction_kwargs"]) == (102, {})
    assert row["tools_kwargs"] == {"t": {"create_kwargs": {"n": 2}}}
    assert (row["dummy_tensor"].dtype, row["dummy_tensor"].shape) == (torch.uint8, (1,))
    assert (
        len(
            RLHFDataset([files / name, files / name], TOKENIZER, {**config, "filter_overlong_prompts": False})
        )
        == 12
    )
    assert len(RLHFDataset(str(files / name), TOKENIZER, config, max_samples=2)) == 2
    parts = data.split(3)
    assert [[row["index"] for row in part] for part in parts] == [[100, 101], [102], [103]]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="4 rows cannot be split into 5"):
        data.split(5)
    copied = copy.copy(data)
    assert "dataframe" not in copied.__dict__, "a copy for a checkpoint holds no rows"
    copied.resume_dataset_state()
    assert len(copied) == 4
    assert len(data.maybe_filter_out_long_prompts(data.dataframe)) == 4


def test_rows_without_extra_info_and_with_text_prompts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    chat = json.dumps([{"role": "user", "content": "hi"}])
    path.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in ("hi", chat)))
    data = RLHFDataset(str(path), TOKENIZER, {})
    assert [data[number]["raw_prompt"] for number in range(2)] == [[{"role": "user", "content": "hi"}]] * 2
    assert (data[0]["extra_info"], data[0]["index"], data[0]["tools_kwargs"]) == ({}, 0, {})


def test_the_tools_of_a_row_count_towards_the_limit(tmp_path: Path) -> None:
    template = CHATML + "{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}"
    tool = {"type": "function", "function": {"name": "calculator"}}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": "hi", **more}) + "\n" for more in ({}, {"tools": [tool]})))
    sizes = [
        len(RLHFDataset(str(path), make_tokenizer(template), {"max_prompt_length": FRAME + 2 + extra}))
        for extra in (9, 10)
    ]
    assert sizes == [1, 2], "the schema is rendered as the 10 letters of its name"


def test_columns_of_a_batch_keep_what_they_hold() -> None:
    batch = collate_fn(
        [
            {"ids": torch.tensor([1, 2]), "pair": [1, 2], "text": "a", "info": {"x": 1}},
            {"ids": torch.tensor([3, 4]), "pair": [3, 4], "text": "b", "info": {}},
        ]
    )
    assert torch.equal(batch["ids"], torch.tensor([[1, 2], [3, 4]]))  # type: ignore[arg-type]
    for name, expected in {"pair": [[1, 2], [3, 4]], "text": ["a", "b"], "info": [{"x": 1}, {}]}.items():
        column = batch[name]
        assert isinstance(column, np.ndarray)
        assert (column.dtype, column.shape) == (np.dtype(object), (2,))
        assert column.tolist() == expected


def test_settings_have_the_names_of_verl_and_ours() -> None:
    config = dataset_settings(DataConfig(max_prompt_tokens=9, truncation="error", prompt_key="q"), 5)
    assert (config.max_prompt_length, config["max_prompt_tokens"], config.get("prompt_key", "p")) == (
        9,
        9,
        "q",
    )
    assert (config.filter_overlong_prompts, config.return_raw_chat, config.seed) == (True, True, 5)
    assert config.get("nothing", 3) == 3
    assert "nothing" not in config
    assert "truncation" in config
    assert copy.copy(config).prompt_key == "q"
    with pytest.raises(AttributeError, match="this config has no nothing. It has .*prompt_key"):
        _ = config.nothing


def body(text: str) -> str:
    return f"class Mine:\n    def __init__(self, *a, **k): pass\n    def __len__(self): return 2\n{text}"


@pytest.mark.parametrize(
    ("source", "name", "match"),
    [
        ("x = 1\nclass Other: pass", "Mine", "has no class of that name; it has Other"),
        ("x = 1", "x", "has no class of that name; it has none"),
        ("import nothing_like_this", "Mine", "cannot be imported: ModuleNotFoundError"),
        (
            "class Mine:\n    def __init__(self, files): pass",
            "Mine",
            "Mine of .* cannot be made: TypeError.*called as",
        ),
        ("class Mine:\n    def __init__(self, *a, **k): pass", "Mine", r"len\(\) failed with TypeError"),
        (body("").replace("2", "0"), "Mine", "has 0 rows"),
        (
            body("    def __getitem__(self, i): return [i]"),
            "Mine",
            "row 0 is a list, but __getitem__ must return",
        ),
        (body("    def __getitem__(self, i): return 1 / 0"), "Mine", "row 0 failed with ZeroDivisionError"),
        (body("    def __getitem__(self, i): return {3: 4}"), "Mine", "row 0 is a dict, but"),
    ],
)
def test_what_is_wrong_with_a_class_is_said(files: Path, source: str, name: str, match: str) -> None:
    with pytest.raises(ValueError, match=match) as error:
        load_rows(settings(files, source, name), "train", TOKENIZER)
    assert "data.dataset_class" in str(error.value)


def test_a_path_may_name_the_class(tmp_path: Path) -> None:
    made = DatasetClassConfig(path="./my_data.py:Mine")
    assert (made.path, made.name) == ("./my_data.py", "Mine")
    made = DatasetClassConfig(path="./my_data.py:Mine", name="Mine")
    assert (made.path, made.name) == ("./my_data.py", "Mine")
    assert DatasetClassConfig(path="my_data.py:Mine", name="Other").path == "my_data.py:Mine"


def test_a_class_needs_file_and_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data.dataset_class.name is empty; set both"):
        DatasetClassConfig(path="a.py")
    config = DataConfig(
        train_files=("a",), dataset_class=DatasetClassConfig(path=str(tmp_path / "no.py"), name="A")
    )
    with pytest.raises(ValueError, match=r"no.py is no file; relative names start at the current directory"):
        load_rows(config, "train", TOKENIZER)
