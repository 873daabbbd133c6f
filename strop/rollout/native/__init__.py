"""The in-process engine: continuous batching over any Hugging Face causal language model.

sampling.py  the next token of many rows, from counter-based random numbers
cache.py     keys and values of the running sequences, and decode attention over them
batch.py     DecodeBatch: admits, prefills, decodes one token for every running sequence
engine.py    NativeEngine: the asyncio face of a DecodeBatch
"""
