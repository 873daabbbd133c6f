"""What the core asks: operations of a model, operations per second of a device, and what bfloat16 gains on a CPU."""

from strop.engines.flops.peak import bfloat16_speedup, peak_flops
from strop.engines.flops.work import model_work

__all__ = ["bfloat16_speedup", "model_work", "peak_flops"]
