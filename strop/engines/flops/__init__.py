"""How much there is to compute, and how much a device can.

work.py    floating-point operations of passes over packed rows
peak.py    operations per second of a device at best, and what bfloat16 gains on a CPU
usage.py   what a step made of its devices
threads.py how many CPU threads tensor operations use
"""

from strop.engines.flops.peak import peak_flops, precision_hint
from strop.engines.flops.usage import usage_metrics, usage_of
from strop.engines.flops.work import model_work

__all__ = ["model_work", "peak_flops", "precision_hint", "usage_metrics", "usage_of"]
