"""The in-process engine: continuous batching over any Hugging Face causal language model.

batch.py          Continuous batching
cache.py          Keys and values of the running sequences on a CPU, and the attention of one decode step
cuda_graph.py     Decode steps of a few fixed shapes, which a GPU captures once and repeats with one call each
decode_kernel.py  Attention of a decode step on a CUDA device
decode_steps.py   Decode steps in place of the model's own forward pass
engine.py         The asyncio face of the in-process engine
fused_layers.py   Hidden states of a decode step on a card, in few kernels
half_copy.py      Copy of a model whose products have weights in half precision, while an accelerator generates
key_values.py     The keys and values that an engine holds
layer_kernels.py  Triton kernels of a decode step between its products
paged_cache.py    Keys and values in pages of one pool, on an accelerator
pages.py          The pages of a cache of keys and values
plain_layers.py   Layers of Llama's form
prefill.py        The tokens that requests begin with
prefix_cache.py   Computed tokens that may begin a later request
prefix_reuse.py   Selection of computed tokens that are kept for later requests
rank_group.py     The ranks that generate together, each with its part of the model
request.py        One sequence of a batch
running.py        The running sequences of a batch
sample_kernel.py  Triton kernel of sampling
sampling.py       The next token of many rows at once
unread.py         Sampled tokens on their way to host memory
cpu/              Compiled kernels of the native engine on a CPU
"""
