"""One model over several ranks, or partly on the host.

ranks.py             Parallel: this process among those that hold one model, and what they exchange
axes.py              the axes that ranks are divided into, compared with their number
model_axes.py        the same axes, compared with the model
process_group.py     the process group, joined and left
fsdp.py              parameters sharded with FSDP2, and gathered for generation
stages.py            layers of each stage of a pipeline, and settings that say how stages are made
pipeline.py          pipeline stages: layers over several ranks
schedule.py          the order in which stages run micro-batches
weight_gradients.py  gradients of weights, computed after their backward pass
stage_links.py       activations and gradients on their way between stages
tensor.py            tensor parallelism: every matrix over several ranks, and the tokens between them
token_exchange.py    all-gather and reduce-scatter of tokens, with gradients
experts.py           expert parallelism: whole experts on different ranks, and tokens that travel to them
vocabulary.py        the vocabulary over several ranks
ulysses.py           sequence parallelism: one packed row over several ranks
context.py           context parallelism: one packed row over several ranks, which exchange keys and values
traffic.py           bytes that a rank sends for a collective
balance.py           rows per rank, of near-equal load
sharded_saving.py    the parts of a checkpoint that each rank writes and reads
offload.py           parameters, gradients and optimizer state on the host
host_activations.py  activations on the host until the backward pass
"""
