"""Batches as hypothesis draws them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from strop.protocol import DataProto, jagged

# A batch is modelled as a list of rows: token ids (ragged), a pair of numbers (dense), any object.
Row = tuple[list[int], list[float], Any]
OBJECTS = st.one_of(st.none(), st.text(max_size=3), st.lists(st.integers(0, 9), min_size=2, max_size=2))
MODEL = st.lists(
    st.tuples(
        st.lists(st.integers(-9, 9), max_size=4),
        st.lists(st.integers(-9, 9).map(float), min_size=2, max_size=2),
        OBJECTS,
    ),
    min_size=1,
    max_size=9,
)


def batch_of(model: list[Row]) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "responses": jagged([torch.tensor(ids, dtype=torch.int64) for ids, _, _ in model]),
            "pair": torch.tensor([pair for _, pair, _ in model]).reshape(len(model), 2),
        },
        non_tensors={"answer": [answer for _, _, answer in model]},
        meta_info={"temperature": 0.7},
    )
