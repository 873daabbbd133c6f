"""Floating-point operations of a model, and the peak rate of a device.

peak.py   The floating-point operations per second that a device can do at best
usage.py  Use of the devices by the passes of a step
work.py   Floating-point operations of the passes over packed rows, from the sizes of a model
"""

from strop.engines.flops.peak import peak_flops, precision_hint
from strop.engines.flops.usage import usage_metrics, usage_of
from strop.engines.flops.work import model_work

__all__ = ["model_work", "peak_flops", "precision_hint", "usage_metrics", "usage_of"]
