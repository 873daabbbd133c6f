"""The rewards of grpo_vs_trl.py and trl_grpo.py, in the signature of verl."""


def position(data_source, solution_str, ground_truth, extra_info=None):
    """Share of positions that are right: dense, so that nearly every group has different rewards."""
    longest = max(len(solution_str), len(ground_truth))
    return sum(a == b for a, b in zip(solution_str, ground_truth, strict=False)) / longest


def letters(data_source, solution_str, ground_truth, extra_info=None):
    """The mean place of the letters in their alphabet: another one for nearly every text, so that no sample of a model
    that has learned nothing is without an advantage."""
    return sum(map(ord, solution_str)) / (128 * max(1, len(solution_str)))
