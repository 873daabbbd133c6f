"""The batch that flows between controller and workers.

schema       the columns of a training batch: what each holds, who makes it and who takes it
columns      dense and jagged tensor columns, and what is done to their rows
batch        DataProto
indices      row numbers, masks, equal ranges
merging      columns and facts by name: chosen, and of the same name joined or refused

Other forms of a batch: forms/ (a folder, one TensorDict).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from strop.compat.folding import (
        fold_batch_dim,
        pad_dataproto_to_divisor,
        unfold_batch_dim,
        unpad_dataproto,
    )
    from strop.controller.ray.future import DataProtoFuture

__all__ = [
    "BatchError",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "cat_columns",
    "flat",
    "fold_batch_dim",
    "from_flat",
    "from_padded",
    "is_jagged",
    "jagged",
    "jagged_like",
    "pad_dataproto_to_divisor",
    "row_lengths",
    "rows",
    "take_rows",
    "to_padded",
    "unfold_batch_dim",
    "unpad_dataproto",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "strop.compat.folding": "fold_batch_dim pad_dataproto_to_divisor unfold_batch_dim unpad_dataproto",
        "strop.controller.ray.future": "DataProtoFuture",
    },
)
