"""Training engines: a causal language model, its packed forward pass and its optimizer, on one process or many.

config.py           ModelConfig, LoraConfig, OptimizerConfig, EngineConfig

The model
causal_lm.py        CausalLM: one model object for training, scoring and native generation
model.py            Hugging Face folders loaded for packed tokens: policies, value models, reward models
probe.py            a loaded model compared with its own forward pass
lora.py, liger.py   adapters; fused kernels

The forward pass
attention.py        attention over packed sequences, shared prompts counted once
packing.py          rows into micro-batches under a hard token budget
head.py             log-probs, entropy and values without a [tokens, vocab] tensor
forward.py          the outputs of one micro-batch
ulysses.py          one packed row over several ranks

Ranks
parallel.py         the processes that hold one model, and what they tell each other
fsdp.py             shards, gathering for generation, host memory

Training
training.py         TrainEngine: log-probs or values of a batch, one optimizer step of a loss
optimizer.py        AdamW and others, clipping, refusal of non-finite gradients
gradients.py        global norm, clipping and non-finite gradients of shards
schedules.py        learning rates; muon.py, adamw_8bit.py: other optimizers

Weights
weights.py          the weight map, and weights as a stream of full tensors; digest.py: their digests
checkpoint.py       sharded checkpoints for any number of ranks; saved_tensors.py, tensor_files.py: their files
role_checkpoint.py  what a role saves; export.py: a checkpoint as a Hugging Face folder
"""
