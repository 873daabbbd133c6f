"""Scoring: what an answer is worth, found out in processes that may hang, crash or lie without harm.

    config.py      RewardConfig
    outcome.py     Outcome (score / error / timeout / infrastructure), RewardError, RewardUnavailable, the summary line
    pool.py        RewardPool: what the trainer uses; policies for what could not be scored
    combining.py   several scores of one sample as one reward
    remote/        judges and reward models on servers
    sandbox/       programs that a model wrote, run where they can do no harm
    managers.py    reward managers of verl, in worker processes (not imported here: it needs torch)
    supervisor.py  the thread that owns workers and deadlines
    worker.py      the parent's side of one worker process
    wire.py        the lines between them (JSON)
    child.py       the worker process; functions.py loads and calls the user's function there
    printed.py     what reward functions print
    scorers/       the built-in scorers by data_source

Nothing here imports torch: a worker process starts in a fraction of a second.
"""

from __future__ import annotations

from strop.rewards.config import RewardConfig
from strop.rewards.outcome import Outcome, RewardError, RewardUnavailable, check_failed_share, summarize
from strop.rewards.pool import RewardPool
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
]
