"""Decode steps of a few fixed shapes, which a GPU captures once and repeats with one call each.

A step of a small batch is hundreds of short kernels, and launching them from a layer's Python takes longer than they
run. A captured step is launched as a whole, but repeats exactly what was captured: the same addresses, the same shapes.
So a batch is padded to the next of a few numbers of sequences, and where the attention of some layer cannot read
lengths on the device (decode_kernel.py), its cache is read up to the next of a few lengths:

    sequences   1 2 4 8 16 ... and the most that may run      padded ones have no tokens, in a page that nobody owns
    tokens      64 128 256 ... and all that the table has     what lies behind a sequence is masked

What a step reads and writes lies in tensors of its own (`_Shape`), in the parameters, and in the pool and the table of
the cache, which stay where they are while sequences come and go. When a parameter or one of these is another tensor,
captures of it are dropped. A shape is captured when it has come CAPTURE_AFTER times, so short runs never pay for it,
and its first answer is compared with that of the model's own forward pass. Layers of Llama's form are captured in fewer
kernels than those of that pass (fused_layers.py). A model whose Python looks at its tokens cannot be captured, and goes
its own way; a capture for which there is no memory is tried again later, each time after twice as many steps.

On a CPU, the padded step and a repeated trace of it are tested. Last measured on a GPU: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.token_budget import is_out_of_memory
from strop.rollout.native.cache import DecodeAttention
from strop.rollout.native.decode_steps import agrees
from strop.rollout.native.fused_layers import FusedLayers, fused_layers
from strop.rollout.native.key_values import KeyValueCache
from strop.rollout.native.paged_cache import PagedCache
from strop.utils.triton import KernelError

logger = logging.getLogger(__name__)

MIN_TOKENS = 64
"""The shortest length that a step reads of the cache."""
CAPTURE_AFTER = 4
"""Steps of one shape before it is captured, which takes about as long as so many."""
_WARM_UPS = 2
"""Steps before a capture, on its stream: libraries allocate what they need in the first ones."""

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Runs a function and keeps it: what repeats it, and the tensor in which its result then lies."""


Hidden = Callable[[Tensor, Tensor, DecodeAttention], Tensor]
"""Final hidden states [B, D] of ids [B] at positions [B]."""


class _Shape:
    """One step of fixed shape: B sequences, and T tokens of the cache."""

    def __init__(
        self, model: CausalLM, hidden: Hidden, cache: PagedCache, num_slots: int, num_tokens: int
    ) -> None:
        self._model, self._hidden, self._cache, self._num_tokens = model, hidden, cache, num_tokens
        self._ids, self._lengths, self._positions = (
            torch.zeros(num_slots, dtype=torch.int64, device=model.device) for _ in range(3)
        )
        self._num_filled = 0
        self._replay: Callable[[], None] | None = None
        self._logits: Tensor
        self.num_uses = 0
        self.is_checked = False

    @property
    def is_captured(self) -> bool:
        """It is repeated, and no longer run from Python."""
        return self._replay is not None

    def fill(self, ids: Tensor, lengths: Tensor, positions: Tensor) -> None:
        """Take the running sequences [b]; the rest of the B have no tokens."""
        count, buffers = len(ids), (self._ids, self._lengths, self._positions)
        torch._foreach_copy_([buffer[:count] for buffer in buffers], [ids, lengths, positions])
        if count < self._num_filled:
            torch._foreach_zero_([buffer[count : self._num_filled] for buffer in buffers])
        self._num_filled = count

    def run(self) -> Tensor:
        """Logits [B, V]. Run again with the same tokens it writes the same keys and values."""
        attention = DecodeAttention(self._cache, self._lengths, num_tokens=self._num_tokens)
        return self._model.head.logits(self._hidden(self._ids, self._positions, attention))

    def repeat(self, capture: Capture) -> Tensor:
        """As `run`, captured the first time. The result is overwritten by the next call."""
        if self._replay is None:
            self._replay, self._logits = capture(self.run)
        self._replay()
        return self._logits


class StaticStep:
    """Logits of one new token per running sequence, in steps of fixed shapes."""

    def __init__(self, model: CausalLM, capture: Capture | None, layers: FusedLayers | None = None) -> None:
        """Args:
        model: whose weights are used.
        capture: keeps a step for repetition; None runs each from Python, which tests of the shapes do.
        layers: compute its hidden states, in place of its own forward pass.
        """
        self._model, self._capture, self._layers = model, capture, layers
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._made_of: tuple[int, ...] = ()
        self._is_current = False
        self._addresses: tuple[int, ...] = ()
        self._wait = 0
        """Steps of a shape before the next capture, after captures for which there was no memory."""
        self.num_captured = 0
        """Steps captured so far."""
        self.is_disabled = False
        """A captured step failed, or gave something else: none is tried again."""

    @property
    def has_fused_layers(self) -> bool:
        """Fused layers are captured, and not the model's own forward pass."""
        return self._layers is not None

    def free(self) -> None:
        """Give the memory of captured steps back."""
        self._drop_shapes()
        self._made_of, self._is_current = (), False
        if self._layers is not None:
            self._layers.free()

    def weights_changed(self) -> None:
        """The weights may be other tensors from now on, not only other numbers in them."""
        self._is_current = False

    def logits(
        self,
        ids: Tensor,
        lengths: Tensor,
        positions: Tensor,
        cache: KeyValueCache,
        *,
        num_tokens: int,
        forward: Callable[[], Tensor],
    ) -> Tensor:
        """Logits [b, V] of the next token; they are overwritten by the next step.

        Args:
            ids: [b], the last tokens.
            lengths: [b], tokens of each sequence in the cache; the new one goes behind them.
            positions: [b] of the new tokens.
            cache: of the sequences.
            num_tokens: the longest one with its new token.
            forward: the same by the model's own forward pass.
        """
        assert isinstance(cache, PagedCache), "what is captured reads pages"
        count = len(ids)
        slots, room = padded_slots(count, cache.capacity), cache.room
        shape = self._shape(cache, slots, padded_tokens(num_tokens, room) if cache.reads_padding else room)
        shape.num_uses += 1
        if self._capture is None:
            shape.fill(ids, lengths, positions)
            return shape.run()[:count]
        if shape.num_uses <= CAPTURE_AFTER + self._wait:
            return forward()
        expected = None if shape.is_checked else forward()
        if expected is not None and not bool(expected.isfinite().all()):  # nothing to compare with
            return expected
        shape.fill(ids, lengths, positions)
        repeated = self._repeated(shape, self._capture)
        if repeated is None:
            return forward()
        logits = repeated[:count]
        if expected is None:
            return logits
        self.num_captured += 1
        shape.is_checked = True
        if agrees(logits, expected, self._model.compute_dtype, what="logits of a captured decode step"):
            return logits
        return self._disable(forward)

    def _repeated(self, shape: _Shape, capture: Capture) -> Tensor | None:
        """Logits [B, V] of a captured step; None where there is no memory to capture it, or it cannot be captured."""
        try:
            return shape.repeat(capture)
        except (RuntimeError, KernelError) as error:
            self._note_refused(error)
        self._drop_shapes()  # their pool has room for nothing else
        if not self.is_disabled:  # only here: the error had held what the capture took
            torch.accelerator.empty_cache()
        return None

    def _note_refused(self, error: Exception) -> None:
        """Try again later where memory was short, also for what the driver keeps of a graph; else never so."""
        if not is_out_of_memory(error):
            what = "decode steps of this model" if self._layers is None else "fused layers of decode steps"
            logger.warning("%s cannot be captured, so that decoding is slower: %s", what, error)
            self._give_up()
            return
        if not self._wait:
            logger.warning("no memory to capture decode steps, which are slower so; it is tried again later")
        self._wait = 2 * max(self._wait, CAPTURE_AFTER)

    def _disable(self, forward: Callable[[], Tensor]) -> Tensor:
        """From now on another way; what was left in the cache is overwritten."""
        self._drop_shapes()
        self._give_up()
        return forward()

    def _give_up(self) -> None:
        """Capture the model's own forward pass, where fused layers were captured; else nothing any more."""
        self._made_of, self._is_current = (), False
        self.is_disabled, self._layers = self._layers is None, None

    def _shape(self, cache: PagedCache, num_slots: int, num_tokens: int) -> _Shape:
        if not self._is_current:  # looking at every parameter takes longer than a few layers
            self._join_weights()
            made_of = tuple(parameter.data_ptr() for _, parameter in self._model.named_parameters())
            if made_of != self._made_of:
                self._drop_shapes()
                self._made_of = made_of
            self._is_current = True
        if cache.addresses != self._addresses:
            self._drop_shapes()
            self._addresses = cache.addresses
        key = (num_slots, num_tokens)
        if key not in self._shapes:
            hidden = self._own_hidden if self._layers is None else self._layers.hidden
            self._shapes[key] = _Shape(self._model, hidden, cache, num_slots, num_tokens)
        return self._shapes[key]

    def _join_weights(self) -> None:
        """Join the weights of fused layers; where there is no memory for that, do without these layers."""
        if self._layers is None:
            return
        try:
            self._layers.join()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("no memory to join weights of products: a decode step is captured in more kernels")
            self._layers.free()
            self._layers = None

    def _own_hidden(self, ids: Tensor, positions: Tensor, attention: DecodeAttention) -> Tensor:
        return self._model.hidden(ids[None], positions[None], attention)

    def _drop_shapes(self) -> None:
        """Forget all steps, once the device has ended the last one that was repeated.

        Their memory is torch's to give back from then on. In segments that grow that waits for the stream which took
        it, the one of captures, and not for the one of repetitions (`unmapHandles` in CUDACachingAllocator.cpp).
        """
        device = self._model.device
        if device.type != "cpu" and any(shape.is_captured for shape in self._shapes.values()):
            # Of a device that has failed: every later call says so too.
            with contextlib.suppress(RuntimeError):
                torch.accelerator.synchronize(device)
        self._shapes.clear()


def padded_slots(count: int, capacity: int) -> int:
    """The next power of two, or all that may run."""
    return min(1 << (count - 1).bit_length(), capacity)


def padded_tokens(count: int, table: int) -> int:
    """The next of 64, 128, 256, ..., or all that the table has."""
    return min(max(MIN_TOKENS, 1 << (count - 1).bit_length()), table)


def static_step(model: CausalLM) -> StaticStep | None:
    """Captured steps of a model on a GPU; None where its own forward pass is needed.

    Layers with a state keep it in tensors that change their address, and sharded parameters are gathered anew.
    """
    if model.device.type != "cuda" or model.is_sharded or model.recurrence is not None:
        return None
    return StaticStep(model, cuda_graphs(), fused_layers(model))


def cuda_graphs() -> Capture:
    """Captures on the current device; all share one pool of memory, since one runs at a time."""
    device: Any = torch.cuda  # whose functions have no types
    stream = device.Stream()
    last: weakref.ref[Any] | None = None
    left: list[Any] = []  # the allocator of pinned memory goes on asking these whether they capture

    def capture(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        nonlocal last
        # A pool ends with its last graph, and its name is of no use afterwards.
        alive = None if last is None else last()
        pool = device.graph_pool_handle() if alive is None else alive.pool()
        graph: Any = device.CUDAGraph()
        current = device.current_stream()
        stream.wait_stream(current)
        with device.stream(stream):  # left again, whatever happens
            for _ in range(_WARM_UPS):
                function()
            stream.synchronize()
            with _without_collection():
                # Other threads may use the device meanwhile: a trainer beside generation does.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    logits = function()
                except BaseException:
                    try:
                        graph.capture_end()
                    except RuntimeError:  # the capture is invalid already
                        if _leave_capture(pool):
                            left.append(graph)
                    raise
                graph.capture_end()
        current.wait_stream(stream)
        last = weakref.ref(graph)
        return graph.replay, logits

    return capture


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage inside: a graph or a kernel of Triton that ends makes a capture invalid
    (github.com/pytorch/pytorch/pull/161037)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _leave_capture(pool: Any) -> bool:
    """Have torch leave a capture on the current device that CUDA refused to end, of this pool of memory; False where it
    has left it by itself.

    Its `capture_end` raises before it does so (ATen/cuda/CUDAGraph.cpp): the allocator would go on as if a capture were
    under way, which frees no memory that another stream has used and gives none back when memory runs out, and the
    generator of random numbers would refuse to draw (torch 2.11; from 2.13 on it has a state for each capture). The
    allocator of pinned memory cannot be told; it asks the graph whenever memory is pinned, which must stay alive.
    """
    device: Any = torch.cuda  # whose functions have no types
    index = device.current_device()
    generator = device.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except RuntimeError:
        return False
    torch._C._cuda_releasePool(index, pool)
    return True
