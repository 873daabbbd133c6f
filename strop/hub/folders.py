"""Which files of a folder are the rows that are meant.

A folder that was downloaded from the hub holds the files of several splits, often below `data/` or below the
name of a configuration, next to descriptions in JSON. Training and test rows must never be mixed by accident,
so a folder with several splits is read only when one of them is named: `FOLDER@train`.
"""

from __future__ import annotations

import re
from pathlib import Path

from strop.data.readers import some_of

_SPLIT = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval)(?=[-_.])")


def folder_files(folder: Path, split: str) -> list[Path]:
    """The data files of a folder, in the order of their names, all of one split.

    JSON files count only where there is neither parquet nor JSON lines.

    Args:
        folder: with files, or with one folder that has them.
        split: which of the splits; empty when there is only one.

    Raises:
        ValueError: there is no data file, or it is not clear which are meant.
    """
    files = _data_files(folder)
    if not files:
        return _files_below(folder, split)
    by_split: dict[str, list[Path]] = {}
    for file in files:
        match = _SPLIT.search(file.name)
        by_split.setdefault(match[1] if match else "", []).append(file)
    if split and split in by_split:
        return by_split[split]
    if not split and len(by_split) == 1:
        return files
    names = [name for name in by_split if name]
    shown = some_of([file.name for file in files])
    if split:
        raise ValueError(f"data folder {folder} has no files of the split {split!r}; it holds {shown}")
    example = f"{folder}@{names[0]}"
    raise ValueError(
        f"data folder {folder} holds files of several splits ({shown}); name one split, for "
        f"example {example}, or the files themselves"
    )


def _files_below(folder: Path, split: str) -> list[Path]:
    inner = sorted(
        path
        for path in folder.iterdir()
        if path.is_dir() and not path.name.startswith(".") and any(map(_is_data, path.rglob("*")))
    )
    for path in inner:
        if split and path.name == split:
            return folder_files(path, "")
    if len(inner) == 1:
        return folder_files(inner[0], split)
    if not inner:
        raise ValueError(
            f"data folder {folder} holds no .parquet or .jsonl file, and was not written by datasets' "
            f"save_to_disk; check the path"
        )
    names = ", ".join(path.name for path in inner)
    raise ValueError(
        f"data folder {folder} holds the folders {names}; name one of them, for example {inner[0]}"
    )


def _data_files(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if _is_data(path))
    return [path for path in files if path.suffix != ".json"] or files


def _is_data(path: Path) -> bool:
    return path.suffix in (".parquet", ".jsonl", ".json") and not path.name.startswith(".") and path.is_file()
