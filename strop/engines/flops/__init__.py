"""How much there is to compute, and how much a device can.

peak.py   The floating-point operations per second that a device can do at best
usage.py  What the passes of a step made of the devices
work.py   How many floating-point operations the passes over packed rows take, from the sizes of a model
"""

from strop.engines.flops.peak import peak_flops, precision_hint
from strop.engines.flops.usage import usage_metrics, usage_of
from strop.engines.flops.work import model_work

__all__ = ["model_work", "peak_flops", "precision_hint", "usage_metrics", "usage_of"]
