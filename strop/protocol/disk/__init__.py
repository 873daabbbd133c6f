"""A batch as a folder: `tensors.safetensors` for the tensor columns, `columns.json` for everything else.

Nothing in it can run code when it is read. The folder is written under a temporary name beside its place
and renamed when it is complete, so that a reader finds a whole batch or none.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.base.durable import fsync_path
from strop.protocol.columns import BatchError, compact, from_flat, is_jagged, parts, share_offsets
from strop.protocol.disk.plain import from_json, to_json
from strop.protocol.merging import object_array

FORMAT = 1
"""Version of the layout; a reader refuses another one."""
_TENSORS = "tensors.safetensors"
_COLUMNS = "columns.json"
_PLAIN_KINDS = "biufU"
"""numpy kinds whose `tolist` and dtype name give the array back: bool, integers, floats, text."""


@dataclass(frozen=True)
class StoredBatch:
    """The parts of a batch, as they are read."""

    num_rows: int
    """Rows of the batch."""
    tensors: Mapping[str, Tensor] | None
    """Tensor columns; None where the batch has no TensorDict at all."""
    others: dict[str, NDArray[Any]]
    """Columns of non_tensor_batch."""
    facts: dict[str, Any]
    """meta_info."""


def write_batch(
    path: Path,
    num_rows: int,
    tensors: Mapping[str, Tensor] | None,
    others: Mapping[str, NDArray[Any]],
    facts: Mapping[str, Any],
) -> None:
    """Write the folder `path`, with the parts of a `StoredBatch`; a batch that is there already is replaced."""
    if path.exists() and not (path / _COLUMNS).is_file():
        raise BatchError(f"{path} exists and is no saved batch; choose another path or remove it")
    record = {
        "format": FORMAT,
        "num_rows": num_rows,
        "tensors": None if tensors is None else list(tensors),
        "non_tensor_batch": {name: _array_to_json(array, name) for name, array in others.items()},
        "meta_info": {key: to_json(fact, f"meta_info[{key!r}]") for key, fact in facts.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        save_file(_flat_tensors(tensors or {}), temporary / _TENSORS)
        (temporary / _COLUMNS).write_text(json.dumps(record, allow_nan=False), encoding="utf-8")
        for file in (_TENSORS, _COLUMNS, "."):
            fsync_path(temporary / file)
        _put_in_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_batch(path: Path) -> StoredBatch:
    """Read a folder that `write_batch` wrote.

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
        found = load_file(path / _TENSORS)
        names = record["tensors"]
        tensors = None if names is None else _columns(found, names)
        others = {name: _array_from_json(column) for name, column in record["non_tensor_batch"].items()}
        facts = {key: from_json(fact) for key, fact in record["meta_info"].items()}
        return StoredBatch(record["num_rows"], tensors, others, facts)
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise BatchError(
            f"the batch in {path} is damaged ({type(error).__name__}: {error}); save it again"
        ) from error


def _flat_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by file name: `dense/<column>`, or `values/<column>` and `offsets/<column>`."""
    flat: dict[str, Tensor] = {}
    for name, column in tensors.items():
        if is_jagged(column):
            values, offsets = parts(column)
            # Columns may share memory, which safetensors refuses: each of these gets its own.
            flat[f"values/{name}"] = compact(values.detach().cpu()).clone()
            flat[f"offsets/{name}"] = offsets.cpu().clone()
        else:
            flat[f"dense/{name}"] = column.detach().cpu().contiguous().clone()
    return flat


def _columns(found: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    columns: dict[str, Tensor] = {}
    for name in names:
        if f"offsets/{name}" in found:
            columns[name] = from_flat(found[f"values/{name}"], found[f"offsets/{name}"].diff())
        else:
            columns[name] = found[f"dense/{name}"]
    return share_offsets(columns)


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
    fsync_path(path.parent)
