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
from strop.protocol.data_proto import DataProto, DataProtoItem
from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.controller.ray.future import DataProtoFuture
    from strop.protocol.folding import (
        fold_batch_dim,
        pad_dataproto_to_divisor,
        unfold_batch_dim,
        unpad_dataproto,
    )

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
        "strop.protocol.folding": "fold_batch_dim pad_dataproto_to_divisor unfold_batch_dim unpad_dataproto",
        "strop.controller.ray.future": "DataProtoFuture",
    },
)
