"""The batch that flows between controller and workers.

columns.py     Tensor columns of a batch
data_proto.py  DataProto
folder.py      A batch as a folder
folding.py     Rows regrouped along a second axis, and rows added so that their number divides
indices.py     Row numbers
merging.py     Columns and facts by name
routed_experts.py  Experts that the tokens of a sequence went to
schema.py      The columns of a training batch, declared once
tensordict.py  Between a batch and a TensorDict that carries its non-tensor columns and facts too
trajectory.py  A prompt, its media and a trajectory
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.controller.ray.future import DataProtoFuture
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
        ".columns": "BatchError cat_columns flat from_flat from_padded is_jagged jagged jagged_like row_lengths rows "
        "take_rows to_padded",
        ".data_proto": "DataProto DataProtoItem",
        ".folding": "fold_batch_dim pad_dataproto_to_divisor unfold_batch_dim unpad_dataproto",
        "strop.controller.ray.future": "DataProtoFuture",
    },
)
