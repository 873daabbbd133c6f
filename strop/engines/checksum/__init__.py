"""Digests of weights: in the fingerprint of every step, and where weights have travelled.

tensors.py  a fast digest of the bits of a tensor
host.py     the same in host memory, at the speed of memory, alone or while copying
models.py   those of all weights of a model, whole or in shards, and one of all of them
"""
