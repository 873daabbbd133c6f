"""One model on several ranks: their process group, and its parameters in shards.

joining.py  what the core asks for
ranks.py    the process group, joined and left
fsdp.py     parameters sharded with FSDP2, and gathered for generation
"""
