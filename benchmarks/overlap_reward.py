"""The reward of grpo_vs_trl.py, in the signature of verl; the same as in trl_grpo.py."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Share of the answer's characters that occur in the word: every group has different rewards."""
    return sum(c in ground_truth for c in solution_str) / max(len(solution_str), 1)
