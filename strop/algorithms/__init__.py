"""Pure functions of tensors: what an algorithm computes, and nothing about where or when.

    config.py        AlgorithmConfig, the numbers a user sets (torch-free)
    advantages.py    credit per token: gae, grpo (with and without std), rloo, reinforce_plus_plus; their registry
    losses.py        policy losses as per-token terms; their registry
    value_loss.py    the critic's loss as per-token terms, and the variance that values explain
    kl.py            per-token KL estimators
    kl_control.py    KL in the reward, and the controllers of its coefficient
    aggregation.py   per-token weights: how terms become one loss, for any cut of the batch
    masked.py        sums, means, variances and whitening under a mask
    evaluation.py    pass@k, best@k, worst@k, maj@k and the Wilson interval, in closed form
    balance.py       partitions of near-equal load; which rows each rank gets
    measures.py      what is measured on the rows of a step
    reduce.py        metric values that know how they merge (torch-free)
    registry.py      names from a config to functions, with what each function needs (torch-free)

Nothing is imported here, so that the torch-free modules stay free of torch.
"""
