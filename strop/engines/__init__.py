"""Training engines: a causal language model, its packed forward pass and its optimizer.

config.py     ModelConfig, OptimizerConfig, EngineConfig
model.py      CausalLM: a Hugging Face folder loaded, checked and run on packed tokens
attention.py  attention over packed sequences, shared prompts counted once
packing.py    rows into micro-batches under a hard token budget
head.py       log-probs and entropy without a [tokens, vocab] tensor
optimizer.py  AdamW, learning-rate schedules, clipping, refusal of non-finite gradients
training.py   TrainEngine: log-probs of a batch, one optimizer step of a loss
"""
