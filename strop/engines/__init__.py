"""Training engines: a causal language model, its packed forward pass and its optimizer, on one process or many.

attention.py          Attention over packed sequences, behind the attention interface of Hugging Face models
attention_buckets.py  Buckets of segments of similar shape, by a fused kernel or by the formula
attention_form.py     Form of a layer's attention, and the context of a pass that computes it
causal_lm.py          CausalLM
checkpoint.py         Sharded checkpoints
checkpoint_reader.py  A sharded checkpoint on disk, opened for reading
compiled_layers.py    Layers that torch.compile has made a function of (engine.compile), and their attention
config.py             Configuration of a model and of the engine that trains it
cpu_products.py       Products of layers on a CPU, in float32 by what is fastest there, which is measured once for a
                      machine
finite_weights.py     Weights that are no numbers, refused where they are read
float64.py            Norms, routers and experts in the precision of the model (model.dtype=float64)
fused_norms.py        Root-mean-square norms in one kernel on a CUDA device
gate_kernels.py       Triton kernels of gated feed-forward parts
grad_scaler.py        The factor that keeps gradients in the range of float16 (model.dtype=float16)
gradients.py          The global norm of gradients that are whole or sharded over ranks, clipping, and the search for
                      poisoned ones
half_weights.py       Frozen weights held in the half precision of computation
head.py               Log-probs and entropy of tokens, through the language-model head, without a [tokens, vocabulary]
                      tensor
head_kernels.py       Triton kernels of the log-prob head
kinds.py              The engine of a role, of one of two kinds (engine.kind)
learning_rates.py     Learning rates that are too large for a trained model, and those that are usual
memory.py             What an update needs of a device's memory, from a model's configuration alone
micro_batch.py        Rows packed end to end, and the part of them that this rank computes
model.py              Models of folders, checked and made ready for packed computation
model_facts.py        What the configuration of a model says about it, beside what the model is
model_folder.py       Checks of a model folder before a library reads it
model_overrides.py    What a user changes about a model folder without writing into it
norm_kernels.py       Triton kernels of root-mean-square norms
optimizer.py          One optimizer step
packing.py            Rows into micro-batches
pass_counts.py        Operations and tokens of the passes of an engine
pipelined.py          Passes of micro-batches through the stages of a pipeline
plain_gates.py        Feed-forward parts that are dense, with a gate
precision.py          Precision of a model's weights, and of its products on a device
prefix_tree.py        The tree of rows that begin alike
pretrained_config.py  Configuration of a model folder, as transformers reads it
pretrained_module.py  Model of a folder, as transformers makes it, with all of its weights
products.py           Products of matrices among the functions of torch
role_checkpoint.py    Checkpoint of a trained role, from which it continues on any number of ranks
role_tensors.py       The tensors of a checkpoint of a trained role, and their names
rotary_kernels.py     Rotary positions in one kernel
segments.py           Runs of tokens in a packed row, and the runs that they continue
token_budget.py       The bound on the tokens of a micro-batch, halved where memory runs out
tokenizer.py          Tokenizer of a model folder
tokens.py             One pass over packed rows
training.py           Forward pass of a model over packed rows (Engine), gradient of a loss over them, and optimizer
                      step (TrainEngine)
transformers4.py      The names of transformers 4 in the folders of saved models
untrusted_model.py    Model folders that somebody else may have made
unused_tokens.py      Token ids that a model has rows for and its tokenizer has no token for
value_models.py       Models with a value head
varlen.py             FlashAttention over segments of unequal lengths, for half precision on a CUDA device
weight_parts.py       Which bytes of a whole weight a rank holds
weights.py            The one weight map of a model
checksum/             Digests of weights
cpu/                  Layers of an update in C, for a CPU
flops/                How much there is to compute, and how much a device can
liger/                Fused kernels of liger-kernel for norms, gated activations and rotary embeddings
linear_attention/     Layers with a recurrent state (linear attention, SSM) on packed tokens
lora/                 LoRA
megatron/             The Megatron engine: layers, schedules and optimizer of megatron-core (engine.kind=megatron)
model_support/        Which models packed computation carries
moe/                  Layers with experts
multimodal/           Images and videos
optimizers/           AdamW, Muon, and AdamW with 8-bit moments
parallel/             One model over several ranks, or partly on the host
quantised/            Folders of models whose weights are quantised, read as the numbers that they stand for
"""
