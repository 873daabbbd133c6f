"""Columns and settings that the built-in advantage estimators and policy losses take, by name (torch-free).

The functions are in advantages/ and losses/, registered under these names by `implements`.
"""

from __future__ import annotations

from strop.algorithms.registry import STEP_COLUMNS, Declaration

_ROWS = frozenset({"group_ids", "response_mask"})
_GROUP = Declaration(needs=_ROWS | {"rewards"}, is_group_relative=True)
"""Compares the rewards of a prompt's samples."""
_GROUP_BY_STD = Declaration(needs=_GROUP.needs, settings=frozenset({"norm_by_std"}), is_group_relative=True)
_TOKEN_BASELINE = Declaration(
    needs=_ROWS | {"token_level_rewards", "old_log_probs", "sum_pi_squared"},
    options={"handle_zero_tail": False},
    is_group_relative=True,
)
"""Compares tokens at the same place of a prompt's samples."""
ESTIMATORS = {
    "grpo": _GROUP_BY_STD,
    "grpo_vectorized": _GROUP_BY_STD,
    "dr_grpo": _GROUP,
    "remax": Declaration(needs=frozenset({"token_level_rewards", "reward_baselines", "response_mask"})),
    "grpo_passk": _GROUP_BY_STD,
    "reinforce_plus_plus": Declaration(
        needs=frozenset({"token_level_rewards", "response_mask"}), settings=frozenset({"gamma"})
    ),
    "reinforce_plus_plus_baseline": _GROUP,
    "rloo": _GROUP,
    "rloo_vectorized": _GROUP,
    "opo": _GROUP,
    "maxrl": _GROUP,
    "raft": Declaration(needs=frozenset({"rewards", "response_mask"})),
    "gpg": Declaration(
        needs=_GROUP.needs, options={"f_norm": 1.0, "count_mixed_groups": False}, is_group_relative=True
    ),
    "gdpo": Declaration(
        needs=_ROWS | {"reward_parts"}, settings=frozenset({"reward_weights"}), is_group_relative=True
    ),
    "gigpo": Declaration(
        needs=_ROWS | STEP_COLUMNS,
        settings=frozenset({"norm_by_std", "gamma"}),
        options={"step_weight": 1.0},
        is_group_relative=True,
    ),
    "optimal_token_baseline": _TOKEN_BASELINE,
    "tir_optimal_token_baseline": _TOKEN_BASELINE,
    "gae": Declaration(
        needs=frozenset({"token_level_rewards", "values", "response_mask"}),
        settings=frozenset({"gamma", "lam"}),
    ),
    "prime": Declaration(
        needs=frozenset({"group_ids", "response_mask", "rewards", "process_rewards"}),
        settings=frozenset({"gamma"}),
        options={"process_weight": 1.0, "outcome_weight": 1.0, "process_norm": True, "whiten": True},
        is_group_relative=True,
    ),
}

_TOKENS = frozenset({"log_probs", "old_log_probs", "advantages"})
_CLIP = frozenset({"clip_low", "clip_high"})
_PER_RESPONSE = Declaration(
    needs=_TOKENS | {"response_mask", "row_ids"}, settings=_CLIP, aggregation="seq-mean-token-mean"
)
"""One ratio per response."""
_TRUNCATED = Declaration(needs=_TOKENS, settings=_CLIP, options={"truncation": 20.0})
_SELECTED = frozenset({"cov_selected"})
_PLAIN = Declaration(needs=_TOKENS)
LOSSES = {
    "vanilla": Declaration(needs=_TOKENS, settings=_CLIP | {"clip_c"}),
    "gpg": _PLAIN,
    "reinforce": _PLAIN,
    "gspo": _PER_RESPONSE,
    "gspo_token": _PER_RESPONSE,
    "gmpo": _PER_RESPONSE,
    "geo_mean": _PER_RESPONSE,
    "cispo": Declaration(needs=_TOKENS, settings=_CLIP),
    "dppo_tv": _TRUNCATED,
    "dppo_kl": _TRUNCATED,
    "sapo": Declaration(
        needs=_TOKENS, options={"tau_pos": 1.0, "tau_neg": 1.05}, aggregation="seq-mean-token-mean"
    ),
    "dro": Declaration(needs=_TOKENS, options={"dro_beta": 1.0}, moves_without_advantage=True),
    "clip_cov": Declaration(
        needs=_TOKENS | _SELECTED,
        settings=_CLIP,
        options={"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "seed": 0},
        prepared=_SELECTED,
    ),
    "kl_cov": Declaration(
        needs=_TOKENS | _SELECTED,
        options={"ppo_kl_coef": 1.0, "kl_cov_ratio": 0.0002},
        prepared=_SELECTED,
        moves_without_advantage=True,
    ),
}
