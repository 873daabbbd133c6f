"""A model that is large for one device: several ranks with its parameters in shards, or tensors that leave the device.

process_group.py       the process group, joined and left
fsdp.py        parameters sharded with FSDP2, and gathered for generation
balance.py     which rows each rank gets
sharded_saving.py      the parts of a checkpoint that each rank writes and reads
offload.py  what leaves the device for a while
"""

from strop.engines.parallel.balance import balanced_rows
from strop.engines.parallel.fsdp import full_parameters, reshard, shard, sync_gradients
from strop.engines.parallel.process_group import joined
from strop.engines.parallel.sharded_saving import load_parts, parts_of

__all__ = [
    "balanced_rows",
    "full_parameters",
    "joined",
    "load_parts",
    "parts_of",
    "reshard",
    "shard",
    "sync_gradients",
]
