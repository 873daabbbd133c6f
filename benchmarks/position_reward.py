"""The reward of grpo_vs_trl.py, in the signature of verl; the same as in trl_grpo.py."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Share of positions that are right: dense, so that nearly every group has different rewards."""
    longest = max(len(solution_str), len(ground_truth))
    return sum(a == b for a, b in zip(solution_str, ground_truth, strict=False)) / longest
