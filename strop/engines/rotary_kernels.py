"""Rotary positions in one kernel, of Triton on a CUDA device and in C on a CPU: queries or keys are read once and
written once, in the precision of attention.

Models of transformers write a rotation as five operations on float32, which are a fifth of the kernels of a decode step
and, in an update, take as long as a layer's products. Last measured: benchmarks/RESULTS.md.

Source: Su et al. 2021, arXiv:2104.09864, with the halves of a head as pairs (as Llama and its kin have them).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from strop.engines.cpu.layers import turned as cpu_turned
from strop.engines.cpu.library import library_for, update_library
from strop.utils.triton import has_kernels, jit, tl, triton

_NAME = "apply_rotary_pos_emb"

Rotate = Callable[..., tuple[Tensor, Tensor]]
"""As transformers has it: (queries, keys, cosines, sines) to queries and keys."""


def use_rotary_kernel(module: nn.Module) -> bool:
    """Let models of this architecture rotate by the kernels; False where theirs is another rotation.

    The rotation is a function of the architecture's module in transformers, so every model of it in this process gets
    the kernels; tensors that these are not for go to the function that was there.
    """
    namespace = vars(sys.modules[type(module).__module__])
    original = namespace.get(_NAME)
    if original is None or (triton is None and update_library() is None):
        return False
    if not getattr(original, "has_rotary_kernel", False):
        if not is_rotation_of_halves(original):
            return False
        namespace[_NAME] = with_kernel(original)
    return True


@torch.no_grad()
def is_rotation_of_halves(function: Rotate) -> bool:
    """True where a function gives, in a trial, what the kernel would."""
    numbers = torch.sin(torch.arange(48.0))
    query, angles = numbers.view(1, 3, 2, 8), torch.arange(16.0).view(1, 2, 8)  # all angles apart
    cosines, sines = angles.cos(), angles.sin()
    turned = torch.cat([-query[..., 4:], query[..., :4]], dim=-1)
    expected = query * cosines[:, None] + turned * sines[:, None]
    try:
        rotated = function(query, query, cosines, sines)
    except (TypeError, RuntimeError, ValueError):
        return False
    return all(torch.allclose(tensor, expected, atol=1e-6) for tensor in rotated)


def with_kernel(original: Rotate) -> Rotate:
    """The kernel where it is for the tensors, the original function elsewhere."""

    def apply_rotary_pos_emb(
        query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, *rest: Any, **options: Any
    ) -> Any:
        is_other = rest or options or torch.compiler.is_compiling()  # a compiler fuses the operations itself
        if is_other or not _is_for(query, key, cosines):
            return original(query, key, cosines, sines, *rest, **options)
        return tuple(rotate(tensor, cosines, sines) for tensor in (query, key))

    apply_rotary_pos_emb.has_rotary_kernel = True  # type: ignore[attr-defined]
    return apply_rotary_pos_emb


def _is_for(query: Tensor, key: Tensor, cosines: Tensor) -> bool:
    dim = query.shape[-1]
    is_one_row = query.dim() == 4 and query.shape[0] == key.shape[0] == 1
    has_angles = is_one_row and cosines.shape == (1, query.shape[2], dim)
    if query.device.type == "cpu":
        return has_angles and dim % 2 == 0 and library_for(query, key) is not None
    is_wide = torch.float64 in (query.dtype, cosines.dtype)
    return has_kernels(query.device) and has_angles and not is_wide and dim >= 16 and dim & (dim - 1) == 0


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """States [1, H, N, D] turned by the angles of their tokens [1, N, D]; in half precision under autocast."""
    result: Tensor = _Rotation.apply(states, cosines, sines)
    return result


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.dtype = states.dtype
        kind = states.device.type
        dtype = torch.promote_types(states.dtype, cosines.dtype)
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return turned(states, cosines, sines, dtype, is_back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return turned(grads[0], cosines, sines, ctx.dtype, is_back=True), None, None


def turned(states: Tensor, cosines: Tensor, sines: Tensor, dtype: torch.dtype, *, is_back: bool) -> Tensor:
    """The rotation of states [1, H, N, D], or its transpose, in this precision; heads of a token lie together."""
    if states.device.type == "cpu":
        return cpu_turned(states, cosines, sines, is_back=is_back)
    return triton_turned(states, cosines, sines, dtype, is_back=is_back)


def triton_turned(
    states: Tensor, cosines: Tensor, sines: Tensor, dtype: torch.dtype, *, is_back: bool
) -> Tensor:
    """The same by the kernel of Triton."""
    _, heads, count, dim = states.shape
    states = states if states.stride(3) == 1 else states.contiguous()
    cosines, sines = cosines.contiguous(), sines.contiguous()
    out = torch.empty(1, count, heads, dim, dtype=dtype, device=states.device)
    if count:
        _turn[(count,)](
            states, states.stride(1), states.stride(2), cosines, sines, out, heads,
            HEADS=triton.next_power_of_2(heads), HALF=dim // 2, IS_BACK=is_back, num_warps=4,
        )  # fmt: skip
    return out.transpose(1, 2)


@jit
def _turn(
    states, stride_head, stride_token, cosines, sines, out, heads,
    HEADS: tl.constexpr, HALF: tl.constexpr, IS_BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    rows, places = tl.arange(0, HEADS), tl.arange(0, HALF)
    mask = (rows < heads)[:, None] & (places >= 0)[None, :]
    at = states + token * stride_token + rows[:, None].to(tl.int64) * stride_head + places[None, :]
    left = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    at_angle = token * 2 * HALF + places
    cos_left = tl.load(cosines + at_angle).to(tl.float32)[None, :]
    cos_right = tl.load(cosines + at_angle + HALF).to(tl.float32)[None, :]
    sin_left = tl.load(sines + at_angle).to(tl.float32)[None, :]
    sin_right = tl.load(sines + at_angle + HALF).to(tl.float32)[None, :]
    if IS_BACK:
        new_left = left * cos_left + right * sin_right
        new_right = right * cos_right - left * sin_left
    else:
        new_left = left * cos_left - right * sin_left
        new_right = right * cos_right + left * sin_right
    at_out = out + (token * heads + rows[:, None]) * 2 * HALF + places[None, :]
    tl.store(at_out, new_left.to(out.dtype.element_ty), mask=mask)
    tl.store(at_out + HALF, new_right.to(out.dtype.element_ty), mask=mask)
