"""What the tests of examples share: scripts as modules, data files, and `strop train` as a README starts it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet

from strop.cli.main import main as strop

REPO = Path(__file__).parents[2]


def load_example(path: str) -> ModuleType:
    """A script of an example, by its path below examples/."""
    name = path.replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, REPO / "examples" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def train(example: str, data: Path, out: Path, *settings: str, config: str = "config.yaml") -> int:
    """`strop train` with the example's configuration, and with data and model from a folder."""
    return strop([
        "train", "--config", str(REPO / "examples" / example / config), "--out", str(out),
        f"model.path={data / 'model'}", f"data.train_files=[{data / 'train.parquet'}]",
        f"data.val_files=[{data / 'val.parquet'}]", *settings,
    ])  # fmt: skip
