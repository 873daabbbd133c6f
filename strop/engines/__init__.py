"""Training engines: a causal language model, its packed forward pass and its optimizer, on one process or many.

config.py           ModelConfig, LoraConfig, OptimizerConfig, EngineConfig

The model
causal_lm.py        CausalLM: one model object for training, scoring and native generation
model.py            Hugging Face folders loaded for packed tokens; model_folder.py: checked before they are read
media.py            what is asked of models with media (strop.vision)

The forward pass
attention.py        attention over packed sequences, shared prompts counted once
recurrence.py       what is asked of layers that carry a state (carried/)
packing.py          rows into micro-batches under a hard token budget
tokens.py           one pass over packed rows, with a function of their tokens
head.py             log-probs and entropy without a [tokens, vocab] tensor

Ranks
parallel.py         the processes that hold one model, and what they tell each other

Training
training.py         Engine: what a model says of rows; TrainEngine: the gradient of a loss, one optimizer step
optimizer.py        AdamW, learning rates, clipping, refusal of non-finite gradients
gradients.py        global norm, clipping and non-finite gradients of shards

Weights
weights.py          the weight map: names, shapes, ties
checkpoint.py       sharded checkpoints for any number of ranks; saved_tensors.py: one that is read
role_checkpoint.py  what a role saves

Below it: lora/ (adapters), optimizers/ (Muon, 8-bit AdamW), sharding/ (a model on several ranks), ulysses/ (one packed
row over several ranks), liger/ (fused kernels), digests/ (of weights), flops/ (how much there is to compute), carried/
(which models are computed as they are: refused by name, or compared with their own forward pass; layers that carry a
state), options/ (a folder's settings and template changed).
"""
