"""A batch as a folder: `tensors.safetensors` for the tensor columns, `columns.json` for everything else.

Nothing in it can run code when it is read. The folder is written under a temporary name beside its place
and renamed when it is complete, so that a reader finds a whole batch or none.

JSON has no tuple, NaN or infinity. They are written as an object with one key, `$tuple` or `$float`; an
object of the data that has such a key itself is written under `$dict`.
"""

from __future__ import annotations

import json
import math
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.protocol.columns import BatchError
from strop.protocol.merging import object_array
from strop.utils.atomic_io import fsync_path, share_as_usual, sync_folder

FORMAT = 1
"""Version of the layout; a reader refuses another one."""
_TENSORS = "tensors.safetensors"
_COLUMNS = "columns.json"
_PLAIN_KINDS = "biufU"
"""numpy kinds whose `tolist` and dtype name give the array back: bool, integers, floats, text."""
_TAGS = ("$tuple", "$float", "$dict")


def write_batch(path: Path, state: Mapping[str, Any]) -> None:
    """Write the folder `path`; a batch that is there already is replaced.

    Args:
        path: of the folder.
        state: `DataProto.__getstate__`.
    """
    if path.exists() and not (path / _COLUMNS).is_file():
        raise BatchError(f"{path} exists and is no saved batch; choose another path or remove it")
    tensors, others, facts = state["tensors"], state["others"], state["facts"]
    record = {
        "format": FORMAT,
        "num_rows": state["length"],
        "tensors": None if tensors is None else list(tensors),
        "non_tensor_batch": {name: _array_to_json(array, name) for name, array in others.items()},
        "meta_info": {key: to_json(fact, f"meta_info[{key!r}]") for key, fact in facts.items()},
    }
    files: dict[str, Tensor] = {}
    for name, (values, offsets) in (tensors or {}).items():
        files[f"dense/{name}" if offsets is None else f"values/{name}"] = values
        if offsets is not None:
            files[f"offsets/{name}"] = offsets
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        # Columns may share memory, which safetensors refuses: each gets its own.
        tensors_to_save = {name: column.detach().cpu().contiguous().clone() for name, column in files.items()}
        save_file(tensors_to_save, temporary / _TENSORS)
        share_as_usual(temporary / _TENSORS)
        (temporary / _COLUMNS).write_text(json.dumps(record, allow_nan=False), encoding="utf-8")
        for file in (_TENSORS, _COLUMNS, "."):
            fsync_path(temporary / file)
        _put_in_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_batch(path: Path) -> dict[str, Any]:
    """The state of a batch, as `write_batch` was given it.

    Raises:
        BatchError: there is no batch, it is damaged, or another version of strop wrote it.
    """
    if not (path / _COLUMNS).is_file():
        raise BatchError(f"{path} is no saved batch: it has no {_COLUMNS}; save_to_disk writes such a folder")
    try:
        record = json.loads((path / _COLUMNS).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise BatchError(
                f"{path} has format {record['format']}, this version of strop reads format {FORMAT}; read it "
                f"with the version that wrote it"
            )
        stored = load_file(path / _TENSORS)
        tensors = None
        if record["tensors"] is not None:
            tensors = {
                name: (stored[f"values/{name}"], stored[f"offsets/{name}"])
                if f"offsets/{name}" in stored
                else (stored[f"dense/{name}"], None)
                for name in record["tensors"]
            }
        return {
            "length": record["num_rows"],
            "tensors": tensors,
            "others": {name: _array_from_json(column) for name, column in record["non_tensor_batch"].items()},
            "facts": {key: from_json(fact) for key, fact in record["meta_info"].items()},
        }
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise BatchError(
            f"the batch in {path} is damaged ({type(error).__name__}: {error}); save it again"
        ) from error


def to_json(value: object, where: str) -> Any:
    """The JSON form of a value; a numpy number becomes the Python number.

    Raises:
        BatchError: a part of the value has no JSON form; the message says where it is, from `where` on.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list):
        return [to_json(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [to_json(item, f"{where}[{number}]") for number, item in enumerate(value)]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        plain = {key: to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {"$dict": plain} if any(tag in plain for tag in _TAGS) else plain
    kind = "dictionary with keys that are no strings" if isinstance(value, Mapping) else type(value).__name__
    raise BatchError(
        f"{where} is a {kind}, which has no JSON form; make it of numbers, strings, lists and dictionaries "
        f"with string keys, put it into a tensor column, or pop it before saving"
    )


def from_json(value: object) -> Any:
    """The value that `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if len(value) == 1:
            (tag, content), *_ = value.items()
            if tag == "$tuple":
                return tuple(from_json(item) for item in content)
            if tag == "$float":
                return float(content)
            if tag == "$dict":
                return {key: from_json(item) for key, item in content.items()}
        return {key: from_json(item) for key, item in value.items()}
    return value


def _array_to_json(array: NDArray[Any], name: str) -> dict[str, Any]:
    if array.dtype == object and array.ndim == 1:
        items = [to_json(item, f"column {name!r}, row {row}") for row, item in enumerate(array)]
        return {"dtype": "object", "rows": items}
    if array.dtype.kind in _PLAIN_KINDS:
        items = [to_json(item, f"column {name!r}, row {row}") for row, item in enumerate(array.tolist())]
        return {"dtype": array.dtype.str, "shape": list(array.shape), "rows": items}
    raise BatchError(
        f"column {name!r} is an array of {array.dtype} with {array.ndim} axes, which has no JSON form; make "
        f"it a tensor column or an object array of one axis, or pop it before saving"
    )


def _array_from_json(column: Mapping[str, Any]) -> NDArray[Any]:
    rows = from_json(column["rows"])
    if column["dtype"] == "object":
        return object_array(rows)
    return np.array(rows, dtype=column["dtype"]).reshape(column["shape"])


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename the complete folder to its place; an earlier batch steps aside first and is then removed."""
    if path.exists():
        earlier = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
        path.rename(earlier)
        temporary.rename(path)
        shutil.rmtree(earlier)
    else:
        temporary.rename(path)
    sync_folder(path.parent)
