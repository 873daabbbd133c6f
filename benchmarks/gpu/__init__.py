"""A first look at strop on a machine with one GPU, in at most eight minutes: `make gpu`.

`make gpu DEVICE=cpu` rehearses it with toys.

Each step is a process of its own with a time limit, and each measurement of a step is guarded, so that a failure
costs itself alone.

    __main__     steps, their order and limits; a JSON line per step, and the summary
    steps        process of one step
    look         one step's settings: device, time left, where measurements go
    workload     a model of random weights in the shape of Qwen3-0.6B, its prompts and batches
    timing       how long work of a device takes, and the memory that it needs
    profiling    idle share, launches and waits of the device
    machine      step env: card, versions, ceilings of the card, costs of small calls
    kernels      step kernels: attention, sampling and the log-prob head, alone
    checks       steps tests and quickstart: what is right on this card
    agreement    step agreement: log-probs of rollout and trainer, greedy tokens of `generate`, tokens in little memory
    compiled     step compile: layers as functions of torch.compile, and a model sharded over one rank
    generation   step rollout: tokens per second beside transformers
    update       step update: tokens per second beside a padded loop
    training     step grpo: whole steps of `strop train`, their phases, waits and idle share
    memory       step memory: memory handed over, and the sentence when it ends
"""
