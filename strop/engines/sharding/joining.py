"""What the core asks of several ranks (place "several ranks")."""

from strop.engines.sharding.fsdp import full_parameters, reshard, shard, sync_gradients
from strop.engines.sharding.ranks import joined

__all__ = ["full_parameters", "joined", "reshard", "shard", "sync_gradients"]
