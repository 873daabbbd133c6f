"""Rotations that the kernels take the place of; these are tried in test_triton_kernels.py and test_cpu_layers.py."""

from __future__ import annotations

import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as in_pairs
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as of_a_part
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as in_halves
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as of_qwen

from strop.engines.rotary_kernels import is_rotation_of_halves, with_kernel


def test_rotations_of_halves_are_known_by_what_they_give() -> None:
    assert is_rotation_of_halves(in_halves)
    assert is_rotation_of_halves(of_qwen)
    assert not is_rotation_of_halves(in_pairs)
    assert not is_rotation_of_halves(of_a_part)
    assert not is_rotation_of_halves(lambda query, key: (query, key))  # another signature


def test_tensors_that_no_kernel_is_for_go_to_the_function_that_was_there() -> None:
    query, key = torch.randn(1, 4, 5, 16).double(), torch.randn(1, 2, 5, 16).double()
    angles = torch.randn(1, 5, 16).double()
    given = (query, key, angles.cos(), angles.sin())
    for found, wanted in zip(with_kernel(in_halves)(*given), in_halves(*given), strict=True):
        assert torch.equal(found, wanted)
