"""Several data sets in one: of TRL's YAML files and scripts, of open-r1, and OpenRLHF's probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.compat.migrate import migrate_openrlhf, migrate_trl, read_openrlhf, read_trl

PARTS = "[{path: org/a}, {path: org/b, name: main, split: head}]"
MIXTURE = (
    "get_dataset(DatasetMixtureConfig(datasets=[DatasetConfig(path='json', data_files='d/a.jsonl'), "
    "DatasetConfig('json', data_files=['d/b.jsonl'])]))['train']"
)
A, B = "hub:org/a@train", "hub:org/b:main@head"


def of_yaml(folder: Path, text: str) -> dict[str, Any]:
    path = folder / "c.yaml"
    path.write_text(text)
    script = read_trl(path, {}, rewards=folder / "r.py")
    return ours(migrate_trl(script.found, script.kind))


def of_script(folder: Path, made: str, kind: str = "SFT") -> dict[str, Any]:
    path = folder / "train.py"
    path.write_text(
        "from datasets import *\nfrom trl import *\n"
        "a = load_dataset('json', data_files='d/a.jsonl', split='train')\n"
        "b = load_dataset('json', data_files='d/b.jsonl', split='train')\n"
        f"{kind}Trainer(model='m', args={kind}Config(), train_dataset={made})\n"
    )
    script = read_trl(path, {}, rewards=folder / "r.py")
    return ours(migrate_trl(script.found, script.kind))


def ours(migration: Any) -> dict[str, Any]:
    assert not migration.open_rows
    return {key: value for row in migration.rows for key, value in row.outcome.ours.items()}


def test_datasets_of_trl_stand_behind_each_other(tmp_path: Path) -> None:
    found = of_yaml(tmp_path, f"packing: true\nmodel_name_or_path: m\ndatasets: {PARTS}\n")
    assert found["sft.data.train_files"] == [A, B]
    assert "sft.data.source_weights" not in found
    rl = of_yaml(tmp_path, f"num_generations: 4\nmodel_name_or_path: m\nstreaming: true\ndatasets: {PARTS}\n")
    assert rl["data.train_files"] == [A, B]
    assert rl["data.streaming"] is True


def test_a_weight_of_open_r1_is_a_share_of_the_rows_of_a_set(tmp_path: Path) -> None:
    mixture = "{datasets: [{id: org/a, config: x, columns: [messages], weight: 0.5}, {id: org/b}], seed: 1}"
    found = of_yaml(tmp_path, f"packing: true\nmodel_name_or_path: m\ndataset_mixture: {mixture}\n")
    assert found["sft.data.train_files"] == ["hub:org/a:x@train", "hub:org/b@train"]
    assert found["sft.data.source_weights"] == {"a:x@train": 0.5, "b@train": 1.0}


def test_rows_that_are_held_back_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"packing: true\nmodel_name_or_path: m\ndatasets: {PARTS}\ntest_split_size: 0.1\n")
    script = read_trl(path, {}, rewards=tmp_path / "r.py")
    rows = migrate_trl(script.found, script.kind).rows
    assert [row.outcome.status for row in rows if row.key == "test_split_size"] == ["refused"]


@pytest.mark.parametrize(
    ("made", "extra"),
    [
        ("concatenate_datasets([a, b])", {}),
        ("concatenate_datasets([a, b]).shuffle(seed=1)", {}),
        (
            "interleave_datasets([a, b], probabilities=[0.7, 0.3])",
            {"sft.data.source_shares": {"a": 0.7, "b": 0.3}},
        ),
        ("interleave_datasets([a, b])", {"sft.data.source_shares": {"a": 1.0, "b": 1.0}}),
        (
            MIXTURE,
            {},
        ),
    ],
)
def test_data_sets_that_a_script_joins(tmp_path: Path, made: str, extra: dict[str, Any]) -> None:
    found = of_script(tmp_path, made)
    assert found["sft.data.train_files"] == ["d/a.jsonl", "d/b.jsonl"]
    assert {key: value for key, value in found.items() if ".source_" in key} == extra


def test_shares_of_openrlhf(tmp_path: Path) -> None:
    def migrated(flags: str) -> dict[str, Any]:
        (tmp_path / "run.sh").write_text(f"python3 -m openrlhf.cli.{flags}")
        return ours(migrate_openrlhf(read_openrlhf(tmp_path / "run.sh", {})))

    sft = migrated("train_sft --pretrain m --dataset d/a.jsonl,d/b.jsonl --dataset_probs 0.4,0.6")
    assert sft["sft.data.source_shares"] == {"a": 0.4, "b": 0.6}
    rl = migrated("train_ppo_ray --pretrain m --prompt_data d/a.jsonl,o/b --prompt_data_probs 0.4,0.6")
    assert rl["data.train_files"] == ["d/a.jsonl", "hub:o/b@train"]
    assert rl["data.source_shares"] == {"a": 0.4, "b@train": 0.6}
    dots = migrated("train_ppo_ray --data.prompt_dataset d/a.jsonl --data.prompt_probs 1.0")
    assert "data.source_shares" not in dots
    (tmp_path / "run.sh").write_text("openrlhf.cli.train_sft --dataset a,b --dataset_probs 1,2,3")
    open_rows = migrate_openrlhf(read_openrlhf(tmp_path / "run.sh", {})).open_rows
    assert "2 data sets, and 3 shares" in [row.outcome.note for row in open_rows]
