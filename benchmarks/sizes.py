"""Sizes of the models that benchmarks measure, for `make_tiny_model`."""

from __future__ import annotations

SMALL = {
    "hidden_size": 256, "num_layers": 5, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "intermediate_size": 768,
}  # fmt: skip
"""4 million parameters."""
LARGE = {
    "hidden_size": 768, "num_layers": 14, "num_heads": 12, "num_kv_heads": 4, "head_dim": 64, "intermediate_size": 2304,
}  # fmt: skip
"""96 million parameters."""
SIZES = {"small": SMALL, "large": LARGE}
