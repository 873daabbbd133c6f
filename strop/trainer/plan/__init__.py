"""Memory and time of a run before it starts, from the configuration of its models alone.

accelerator.py        Kernels of an accelerator as a trace sees them
baseline.py           Memory of a process before it has a model
batches.py            Lengths of answers, micro-batches, and the largest one
candidates.py         Placements that a search tries
changes.py            Copies of a configuration with other values
cpu_layers.py         Compiled layers of a CPU as a trace sees them
devices.py            Memory and speed of devices: published, or of this CPU as measured
generation_memory.py  Memory of a rank that generates
generation_time.py    Seconds of generation
heap.py               Heap of a process on a CPU
heap_gaps.py          Gaps that one step leaves in it to the next
heap_replay.py        Heap in a pass through all layers
memory.py             Memory of a rank in each phase of a step
parameters.py         Parameters of a model by their place, and the share of a rank
pass_memory.py        Memory of a rank in the passes of a role
pass_time.py          Seconds of the passes of a role
meta_model.py         A model as a plan sees it, with few layers and without numbers
passes.py             Memory and work of the passes of a model over a micro-batch
placement.py          Search for a placement by the cost model
placement_prices.py   Seconds of placements that fit, by parts that many have in common
plan.py               A run's plan, put together
rank_costs.py         Costs of two ranks of this machine that talk
roles.py              Roles of a run as the plan sees them
sampling_cost.py      Memory and work of sampling a token
smallest_change.py    The smallest change of a configuration with which its memory fits
state_memory.py       Memory of weights, gradients and optimizer in every phase
step_time.py          Seconds of the stages of a step
tracing.py            Trace of a pass without numbers
transfer_memory.py    Memory of a rank while weights move
trial.py              Passes and decode steps of a model's first layers, done for real on this processor
unsaid_sizes.py       Sizes that a config.json does not say
"""
