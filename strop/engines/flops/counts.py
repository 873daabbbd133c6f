"""What the core asks: operations of a model, and operations per second of a device."""

from strop.engines.flops.peak import peak_flops
from strop.engines.flops.work import model_work

__all__ = ["model_work", "peak_flops"]
