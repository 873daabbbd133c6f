"""Pure functions of tensors: what an algorithm computes, and nothing about where or when.

    config.py            AlgorithmConfig, the numbers a user sets (torch-free)
    names.py             words for ways of reducing a loss and of estimating a KL (torch-free)
    registry.py          names from a config to functions, with what each function needs (torch-free)
    specs.py      what the built-in ones need and what may be set (torch-free)

    advantages/          credit per token: an estimator per paper, and their registry
    losses/              policy losses as per-token terms, and their registry
    sequence_credit.py   credit of episodes of several training sequences
    kl.py                per-token KL estimators
    aggregation.py       per-token weights: how terms become one loss, for any cut of the batch
    (distillation/, learning from a teacher; group_functions/, filters and
    reward shaping of a user's own, and penalties on long responses)

    batch_metrics.py     what is measured on the rows of a step

Rules that functions keep, ours and a user's own, are checked by `strop.cli`.
Nothing is imported here, so that the torch-free modules stay free of torch.
"""
