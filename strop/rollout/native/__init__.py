"""The in-process engine: continuous batching over any Hugging Face causal language model.

sampling.py  the next token of many rows, from counter-based random numbers
request.py   one sequence: what was asked, and the tokens so far
prefill.py   computes what requests begin with, in pieces of bounded size
cache.py     keys and values of the running sequences, and decode attention over them
compiled.py  what may be compiled for the processor
batch.py     DecodeBatch: admits, decodes one token for every running sequence, releases
engine.py    NativeEngine: the asyncio face of a DecodeBatch

Others make it faster: `captured` has decode steps of a few fixed shapes, captured once on a GPU and repeated,
`strop.rollout.native.cpu` has decode steps, attention and sampling compiled in C, and `kept` keeps computed tokens that may begin a
later request.
"""
