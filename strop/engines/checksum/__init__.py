"""Digests of weights: in the fingerprint of every step, and where weights have travelled.

tensors.py  a fast digest of the bits of a tensor
models.py   those of all weights of a model, whole or in shards, and one of all of them
"""
