"""Data files of a folder.

A folder that was downloaded from the hub holds the files of several splits, often below `data/` or below the
name of a configuration, next to descriptions in JSON. Training and test rows must never be mixed by accident,
so a folder with several splits is read only when one of them is named: `FOLDER@train`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow

from strop.data.entries import list_some
from strop.data.json_rows import parse_object
from strop.utils.safe_read import check_regular, read_text

_SPLIT = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval)(?=[-_.])")


def leaves(path: Path, split: str) -> list[Path]:
    """Data files of a folder, or the folder itself where `datasets` wrote it.

    Raises:
        ValueError: it has several splits, and none of these is named, or no data file.
    """
    if (path / "dataset_dict.json").exists():
        dict_file = path / "dataset_dict.json"
        splits = parse_object(read_text(dict_file), str(dict_file)).get("splits")
        names = [str(name) for name in splits] if isinstance(splits, list) else []
        if split in names:
            return [path / split]
        example = path / names[0] if names else path
        raise ValueError(
            f"data folder {path} is a dataset with the splits {', '.join(names)}; name one of them, for "
            f"example {example}"
        )
    if (path / "state.json").exists():
        return [path]
    return folder_files(path, split)


def open_saved(path: Path) -> Any:
    """The `datasets.Dataset` of a folder that `save_to_disk` wrote, mapped into memory."""
    import datasets  # heavy, and only folders need it

    try:
        for inner in path.iterdir():
            if not inner.is_dir():
                check_regular(inner)
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise ValueError(
            f"data folder {path} cannot be read by datasets ({type(error).__name__}: {error}); save it again "
            f"with save_to_disk"
        ) from error


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
    listed = list_some([file.name for file in files])
    if split:
        raise ValueError(f"data folder {folder} has no files of the split {split!r}; it holds {listed}")
    example = f"{folder}@{names[0]}"
    raise ValueError(
        f"data folder {folder} holds files of several splits ({listed}); name one split, for "
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
