"""Scoring: what an answer is worth, found out in processes that may hang, crash or lie without harm.

    config.py      RewardConfig
    outcome.py     Outcome (score / error / timeout / infrastructure), RewardError, RewardUnavailable, the summary line
    pool.py        RewardPool: what the trainer uses; what becomes of what could not be scored
    combine.py   several scores of one sample as one reward
    worker_pool.py     the functions in worker processes: the thread that owns those and their deadlines
    worker_process.py      the parent's side of one worker process
    wire.py        the lines between them (JSON)
    worker_main.py       the worker process; functions.py loads and calls the user's function there
    deadline.py     time that a deadline does not count
    stdout_capture.py     what reward functions print
    managers.py, budget.py  names that reward files import

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
