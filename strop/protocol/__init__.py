"""The batch that flows between controller and workers.

schema       the columns of a training batch: what each holds, who makes it and who takes it
columns      dense and jagged tensor columns, and what is done to their rows
batch        DataProto
indices      row numbers, masks, equal ranges
merging      columns and facts by name: chosen, and of the same name joined or refused

A guest has a batch in other forms: forms/ (a folder, one TensorDict).
"""

from __future__ import annotations

from strop.base.lazy_names import lazy_names
from strop.protocol.batch import DataProto, DataProtoItem
from strop.protocol.columns import (
    BatchError,
    cat_columns,
    flat,
    from_flat,
    from_padded,
    is_jagged,
    jagged,
    jagged_like,
    row_lengths,
    rows,
    take_rows,
    to_padded,
)

__all__ = [
    "BatchError",
    "DataProto",
    "DataProtoItem",
    "cat_columns",
    "flat",
    "from_flat",
    "from_padded",
    "is_jagged",
    "jagged",
    "jagged_like",
    "row_lengths",
    "rows",
    "take_rows",
    "to_padded",
]

__getattr__, __dir__ = lazy_names(__name__, {})
