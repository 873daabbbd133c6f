"""Scoring: what an answer is worth, found out in processes that may hang, crash or lie without harm.

budget.py            Public import path of `bounded` for reward files
combine.py           Several scores of one sample as one reward
concurrent_calls.py  Calls that one worker process has under way at the same time
config.py            Reward settings
function_loading.py  Loads reward functions in the worker process
functions.py         RewardFunction
group_scoring.py     Answers to a prompt, scored in one call
listed_functions.py  Reward functions over lists of answers
managers.py          Public import path of `RewardManagerBase` and `register` for reward files
outages.py           Exceptions that say that something scoring needs is not there
outcome.py           Outcome of one attempt to score a sample, and the summary of a step's outcomes
passing.py           Pass verdict of answers
pool.py              Reward pool
query_functions.py   Reward functions of OpenRLHF, which take whole sequences as text
required.py          Parts of a reward that a run trains with (algorithm.reward_keys)
rescoring.py         Saved answers, scored again by a reward
stdout_capture.py    Output of reward functions
verl_managers.py     Reward managers of verl
wire.py              Wire format between the reward pool and its worker processes
worker_coroutines.py Calls of coroutine functions in a worker process
worker_main.py       The worker process of the reward pool
worker_pool.py       The reward functions of a run in worker processes
worker_process.py    The parent's handle to one worker process
worker_scoring.py    Scoring of one sample in a worker process
worker_setup.py      Setup of worker processes: their limits, and the source of each reward function
certify/             A reward function tested without a model
judges/              Scores that come over HTTP
scorers/             The built-in scorers, one module each, chosen by the `data_source` of a row

Nothing here imports torch: a worker process starts in a fraction of a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.rewards.config import RewardConfig
    from strop.rewards.outcome import Outcome, RewardError, RewardUnavailable, check_failed_share, summarize
    from strop.rewards.pool import RewardPool, try_loading
    from strop.rewards.scorers import default_compute_score, known_data_sources

__all__ = [
    "Outcome",
    "RewardConfig",
    "RewardError",
    "RewardPool",
    "RewardUnavailable",
    "check_failed_share",
    "default_compute_score",
    "known_data_sources",
    "summarize",
    "try_loading",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".config": "RewardConfig",
        ".outcome": "Outcome RewardError RewardUnavailable check_failed_share summarize",
        ".pool": "RewardPool try_loading",
        "strop.rewards.scorers": "default_compute_score known_data_sources",
    },
)
