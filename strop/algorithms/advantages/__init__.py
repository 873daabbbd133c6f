"""Advantage estimators: from rewards to the credit of each token.

    registration.py            the registry, and the one way to call an estimator
    groups.py                  helpers of the estimators: groups, checks, one number per sample spread over its tokens
    group_relative.py          grpo, dr_grpo: samples of a prompt compared
    group_baselines.py         rloo, grpo_passk, opo, gpg, maxrl: other baselines from the samples of a prompt
    gae.py                     gae: from the values of a critic
    reward_to_go.py            credit that differs between the tokens of a response
    reinforce_pp.py            REINFORCE++: whitened over the batch
    remax.py                   remax: compared with the greedy answer
    optimal_token_baseline.py  every token compared with the peers' tokens at the same place
    raft.py                    raft: rejection sampling
    prime.py                   prime: rewards of single tokens
    gigpo.py                   gigpo: episodes of several answers
    anchor_groups.py           its groups of answers given in the same state
    verl_convention.py         estimators in verl's calling convention

An estimator is a pure function of padded tensors. It is registered with the columns and settings that it
takes by keyword; `estimate_advantages` passes exactly those. Settings of its own are its keyword defaults. What the
estimators here take stands in `strop.algorithms.builtin_specs`, which needs no torch.
Rules that hold for every estimator here (tests/algorithms/contract; `strop check estimator` asks some of any):

* A reward counts wherever it sits, also on a token that the policy did not sample (a tool's reply).
* Advantages are exactly 0 outside the response mask.
* A group of one has no baseline: its advantage is 0. Equal rewards give exactly 0, whatever their rounding. (Not
  raft, which compares nothing: its samples were chosen before.)
* Values outside the mask never matter.
"""

from strop.algorithms.advantages import (  # noqa: F401  (they register their functions)
    gae,
    gigpo,
    group_baselines,
    group_relative,
    optimal_token_baseline,
    prime,
    raft,
    reinforce_pp,
    remax,
    reward_to_go,
)
from strop.algorithms.advantages.registration import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageFn,
    adv_estimator_columns,
    call_estimator,
    estimate_advantages,
    get_adv_estimator_fn,
    group_ids_of,
    register_adv_est,
)

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "AdvantageFn",
    "adv_estimator_columns",
    "call_estimator",
    "estimate_advantages",
    "get_adv_estimator_fn",
    "group_ids_of",
    "register_adv_est",
]
