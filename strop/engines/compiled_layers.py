"""Layers that torch.compile has made a function of (engine.compile), and the attention that they call.

Layers of a kind are one function, for rows of any packing: numbers of tokens and segments are arguments to it. It has
attention inside where that is one operation (`PackedAttention.one_call`); elsewhere attention stays plain Python,
and the function is two, one on each side of it. There is one for passes with a gradient and one for those without, and
one for rows that share beginnings. What would make more of them is kept from the compiler: the numbers of layers, and
rows of one token, which run as they were written. Layers of which a rank has parts (engine.tensor_parallel) would be a
function each, since each of their matrices has hooks, whose numbers the compiler compares: they are refused. Layers
with experts are one each too, since each router has a forward pass of its own (moe/routing.py); behind eight the
compiler makes no more, and the other layers run as they were written.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from strop.engines.attention import PackedAttention
from strop.engines.attention_form import AttentionContext, AttentionForm
from strop.engines.parallel.context import ContextAttention
from strop.engines.parallel.ulysses import UlyssesAttention

_ALIKE = (PackedAttention, UlyssesAttention, ContextAttention)
"""Attention that is the same in all layers, whatever their number."""


def in_compiled_layers(context: AttentionContext) -> AttentionContext:
    """A context as compiled layers call it."""
    plan = context.one_call if isinstance(context, PackedAttention) else None
    if plan is None:
        return _Uncompiled(context)
    for table in plan.tables:  # else sizes that are equal in the first row are taken to be equal in all
        torch._dynamo.mark_dynamic(table, 0)
    return context


class _Uncompiled:
    """An attention context that compiled layers call as plain Python: its plan differs from batch to batch."""

    def __init__(self, context: AttentionContext) -> None:
        self._attend: Any = torch.compiler.disable(context.attend)  # type: ignore[no-untyped-call]
        self._needs_layer = not isinstance(context, _ALIKE)
        if hasattr(context, "recur"):  # of a model with layers that carry a state
            self.recur: Any = torch.compiler.disable(context.recur)  # type: ignore[no-untyped-call]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """As of the context."""
        output: Tensor = self._attend(layer if self._needs_layer else 0, query, key, value, form)
        return output


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Context in which compiled layers run as they were written."""
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
