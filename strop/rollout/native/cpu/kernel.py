"""Decode steps in C, for a CPU: compiled once for a machine and a shape of heads, in about a second.

For every model the next tokens, and attention of one token per sequence: the torch formulation of the native engine
reads every sequence to the length of the longest, in many small matrix products. And for models of Llama's form a whole
step or prefill (steps.py). Where gcc is missing or fails, or for another precision or device, torch computes all of it.
Their results differ by rounding. Last measured: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.engines.attention_form import AttentionForm
from strop.utils.c_library import FUSED_SUMS, VECTORS, WIDE_VECTORS, c_library
from strop.utils.rng import uniforms

_FOLDER = Path(__file__).parent
DECODE, SAMPLE = _FOLDER / "decode.c", _FOLDER / "sample.c"
HEADERS = (_FOLDER / "decode_attention.h", _FOLDER / "packed_products.h")
"""Of decode.c."""
FLAGS = (
    "-O3", "-march=native", *WIDE_VECTORS, *FUSED_SUMS, "-ffast-math", "-fno-associative-math",
    "--param=vect-max-peeling-for-alignment=0", "-fopenmp", "-fPIC",
)  # fmt: skip


class Layer(ctypes.Structure):
    """`struct layer` of decode.c: addresses of tensors that stay where they are."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "qkv", "out", "gate_up", "down", "qkv_bias", "out_bias", "gate_up_bias", "down_bias",
            "query_norm", "key_norm", "next_norm", "next_layer_norm",
        )),
        ("window", ctypes.c_int64), ("eps", ctypes.c_float), ("scaling", ctypes.c_float),
    )  # fmt: skip


SEQUENCE = np.dtype(
    [
        ("keys", np.uint64),
        ("values", np.uint64),
        ("layer_step", np.int64),
        ("head_step", np.int64),
        ("shared_at", np.int64),
        ("num_shared", np.int64),
    ]
)
"""`struct sequence` of decode.c: addresses of the first layer; numbers from layer to layer, from head to head, and from
there to another sequence with the same beginning; tokens of that."""


def slots_of(table: Tensor, count: int) -> NDArray[np.void]:
    """The first slots [count] of `SEQUENCE` of keys and values [2, L, slots, Hkv, T, D]; none shares its beginning."""
    assert table.stride()[4:] == (table.shape[5], 1), "tokens of a slot lie one after another"
    both, layer, slot, head = table.stride()[:4]
    sequences = np.zeros(count, dtype=SEQUENCE)
    first, size = table.data_ptr(), table.element_size()
    sequences["keys"] = first + np.arange(count) * (slot * size)
    sequences["values"] = sequences["keys"] + np.uint64(both * size)
    sequences["layer_step"], sequences["head_step"] = layer, head
    return sequences


class DecodeKernel:
    """The compiled functions for one shape of heads."""

    def __init__(self, library: Path) -> None:
        functions = ctypes.CDLL(str(library))
        pointer, number, real, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        self._decode = functions.decode
        self._decode.argtypes = [pointer] * 7 + [number] * 2 + [pointer, real, number, small]
        self._step, self._step_room = functions.step, functions.step_room
        self._step.argtypes = [
            pointer, number, *[pointer] * 8, *[number] * 5, pointer, small,
        ]  # fmt: skip
        self._step.restype = None
        self._step_room.argtypes = [number] * 4 + [small]
        self._multiply = functions.multiply
        self._multiply.argtypes = [pointer] * 4 + [number] * 3 + [small]
        self._multiply.restype = None
        self._step_room.restype = functions.panel_width.restype = number
        self.panel_width: int = functions.panel_width()
        """Columns of packed weights that lie together."""

    def step(
        self,
        layers: ctypes.Array[Layer],
        first_norm: Tensor,
        stream: Tensor,
        turns: tuple[Tensor, Tensor],
        sequences: NDArray[np.void],
        tokens: NDArray[np.int64],
        ends: NDArray[np.int64],
        *,
        inner: int,
        longest: int,
        room: Tensor,
    ) -> Tensor:
        """Final hidden states [E, K] float32 of some of N new tokens, after the last norm.

        Args:
            layers: of the model.
            first_norm: [K] float32, of what goes into the first layer.
            stream: embeddings [N, K] float32, contiguous; written to.
            turns: cosines and sines [positions, D] float32 of the rotary embedding.
            sequences: [S] of `SEQUENCE`, whose keys and values the new tokens enter.
            tokens: [N, 2], sequence and place in it of each new token; those of a sequence one after another.
            ends: [E], rows of the last tokens of sequences; all rows where each sequence has one.
            inner: width of the feed-forward part.
            longest: tokens of the longest sequence with its new ones.
            room: float32, of the caller alone, which grows to what is needed: fresh memory costs as much as a small
                step.
        """
        count, size = stream.shape
        threads = torch.get_num_threads()
        needed = self._step_room(count, size, inner, longest, threads)
        if len(room) < needed:
            room.resize_(needed)
        out = torch.empty(len(ends), size)
        tables = [table.ctypes.data for table in (sequences, tokens, ends)]
        self._step(
            ctypes.byref(layers), len(layers), first_norm.data_ptr(), stream.data_ptr(), out.data_ptr(),
            *(tensor.data_ptr() for tensor in turns), *tables,
            count, len(ends), size, inner, longest, room.data_ptr(), threads,
        )  # fmt: skip
        return out

    def multiply(self, rows: Tensor, panels: Tensor, bias: Tensor | None, *, width: int) -> Tensor:
        """Products [B, width] of rows [B, K] float32, contiguous, with packed weights, plus bias.

        Args:
            rows: as they are.
            panels: as `step` has them.
            bias: of each packed column, or None.
            width: columns that are not padding.
        """
        out = torch.empty(len(rows), width)
        self._multiply(
            rows.data_ptr(), panels.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
            *rows.shape, width, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        *,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """Attention output [B, H, D] in float32; key and value [B, Hkv, D] enter keys and values [B, Hkv, T, D].

        Args:
            lengths: [B] int64, tokens already there; each is below T.

        Raises:
            MemoryError: there is no room for the scores of one sequence.
        """
        query, key, value = (tensor.float() for tensor in (query, key, value))
        if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        assert keys.stride()[2:] == (keys.shape[3], 1), "tokens of a slot lie one after another"
        assert keys.stride() == values.stride(), "keys and values lie alike"
        steps = [size for tensor in (query, key, value, keys) for size in tensor.stride()[:2]]
        out = torch.empty(query.shape, dtype=torch.float32)
        tensors = (query, key, value, out, keys, values, lengths)
        failed = self._decode(
            *(tensor.data_ptr() for tensor in tensors),
            len(lengths),
            keys.shape[2],
            (ctypes.c_int64 * 8)(*steps),
            scaling,
            window or 0,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for the attention scores of {keys.shape[2]} tokens")
        return out


def decode_kernel(query: Tensor, keys: Tensor) -> DecodeKernel | None:
    """The function for query [B, H, D] over keys [B, Hkv, T, D]; None where there is none."""
    if keys.device.type != "cpu" or keys.dtype not in (torch.float32, torch.bfloat16):
        return None
    if torch.promote_types(query.dtype, torch.float32) != torch.float32:
        return None
    kv_heads, dim = keys.shape[1], keys.shape[3]
    return compiled(dim, kv_heads, query.shape[1] // kv_heads, keys.dtype == torch.bfloat16)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    form: AttentionForm,
) -> Tensor | None:
    """Attention output [B, H, D] for query [B, H, D]; key and value [B, Hkv, D] enter the cache. None where nothing is
    compiled for such tensors.

    Args:
        query, key, value: of one new token per sequence.
        keys, values: [B, Hkv, T, D], the cache.
        lengths: [B] int64, tokens already there; each is below T.
        form: of the layer, without chunks, sinks and caps.
    """
    kernel = decode_kernel(query, keys)
    if kernel is None:
        return None
    out = kernel.attend(query, key, value, keys, values, lengths, scaling=form.scaling, window=form.window)
    return out.to(query.dtype)


class SampleKernel:
    """The compiled function of sample.c."""

    def __init__(self, library: Path) -> None:
        self._sample = ctypes.CDLL(str(library)).sample
        self._sample.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 2 + [ctypes.c_int]

    def sample(
        self, logits: Tensor, temperature: NDArray[np.float64], uniform: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B] int64 and their log-probs [B] of logits [B, V] float32.

        Args:
            logits: as they are; V is not 0.
            temperature: [B]; 0 takes the likeliest token, and gives its log-prob at 1.
            uniform: [B], in [0, 1).

        Raises:
            MemoryError: there is no room for one row.
        """
        logits = logits.contiguous()
        temperature, uniform = np.ascontiguousarray(temperature), np.ascontiguousarray(uniform)
        tokens, log_probs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        failed = self._sample(
            logits.data_ptr(), temperature.ctypes.data, uniform.ctypes.data, tokens.data_ptr(), log_probs.data_ptr(),
            *logits.shape, torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for the probabilities of {logits.shape[1]} tokens")
        return tokens, log_probs


@cache
def sample_kernel() -> SampleKernel | None:
    """None where nothing can be compiled."""
    library = _library(SAMPLE)
    return None if library is None else SampleKernel(library)


def sample(
    logits: Tensor,
    temperature: NDArray[np.float64],
    key: NDArray[np.uint64],
    position: NDArray[np.int64],
) -> tuple[Tensor, Tensor] | None:
    """Tokens [B] int64 and their log-probs [B] of the whole distribution of logits [B, V]; None where nothing is
    compiled for such tensors.

    Args:
        logits: as they are; V is not 0.
        temperature: [B]; 0 takes the likeliest token, and gives its log-prob at 1.
        key, position: [B] of the random number of each row.
    """
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return None
    kernel = sample_kernel()
    return None if kernel is None else kernel.sample(logits, temperature, uniforms(key, position))


@cache
def compiled(dim: int, kv_heads: int, group: int, is_bfloat16: bool) -> DecodeKernel | None:
    """The functions for so many numbers per head, key heads, and query heads of each; None where nothing compiles."""
    shape = [f"-DDIM={dim}", f"-DKV_HEADS={kv_heads}", f"-DGROUP={group}"]
    library = _library(DECODE, *shape, *(["-DBF16"] if is_bfloat16 else []), headers=HEADERS)
    return None if library is None else DecodeKernel(library)


def _library(source: Path, *shape: str, headers: Sequence[Path] = ()) -> Path | None:
    return c_library(source, flags=(*FLAGS, *shape), doing="decoding", included=[VECTORS, *headers])
