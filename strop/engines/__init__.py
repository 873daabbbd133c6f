"""Training engines: a causal language model, its packed forward pass and its optimizer, on one process or many.

config.py           ModelConfig, LoraConfig, OptimizerConfig, EngineConfig

The model
causal_lm.py        CausalLM: one model object for training, scoring and native generation
model.py            Hugging Face folders loaded for packed tokens; model_folder.py: checked before they are read
model_with_media.py            what is asked of models with media (strop.engines.multimodal)

The forward pass
attention.py        attention over packed sequences, shared prompts counted once
layers.py       what is asked of layers that carry a state (model_support/)
packing.py          rows into micro-batches under a hard token budget
tokens.py           one pass over packed rows, with a function of their tokens
head.py             log-probs and entropy without a [tokens, vocab] tensor

Ranks
ranks.py         the processes that hold one model, and what they tell each other

Training
training.py         Engine: what a model says of rows; TrainEngine: the gradient of a loss, one optimizer step
optimizer.py        AdamW, learning rates, clipping, refusal of non-finite gradients
gradients.py        global norm, clipping and non-finite gradients of shards

Weights
weights.py          the weight map: names, shapes, ties
checkpoint.py       sharded checkpoints for any number of ranks; checkpoint_reader.py: one that is read
role_checkpoint.py  what a role saves

Below it: lora/ (adapters), optimizers/ (Muon, 8-bit AdamW), parallel/ (a model on several ranks), parallel/ (one packed
row over several ranks), liger/ (fused kernels), checksum/ (of weights), flops/ (how much there is to compute), model_support/
(which models are computed as they are: refused by name, or compared with their own forward pass; layers that carry a
state), engines/ (a folder's settings and template changed).
"""
