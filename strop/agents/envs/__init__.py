"""Environments, which answer actions of the model with observations and rewards.

base.py               Environment, Observation, Step, and checks of returned values
loading.py            environments by name, by file, and with the arguments of a row
playing.py            an environment of one episode: async, with deadlines, checked
credit.py             rewards of single answers in training sequences
gymnasium_env.py      Gymnasium
openenv_env.py        servers of OpenEnv
reasoning_gym_env.py  tasks of reasoning-gym
verifiers_env.py      tasks of verifiers 0.4
agent.py              the agent that plays them
plugin.py             check of the environments of a run; config.py: agent.environment and agent.credit
certificate.py        inspection of an environment without a model, by scripted players
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.agents.envs.base import Environment, EnvironmentFailed, Observation, Step
    from strop.agents.envs.loading import (
        EnvironmentChoice,
        choose_environment,
        environments,
        find_environment,
        register_environment,
    )
    from strop.agents.envs.playing import PlayedEnvironment, episode_seed

__all__ = [
    "Environment",
    "EnvironmentChoice",
    "EnvironmentFailed",
    "Observation",
    "PlayedEnvironment",
    "Step",
    "choose_environment",
    "environments",
    "episode_seed",
    "find_environment",
    "register_environment",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".base": "Environment EnvironmentFailed Observation Step",
        ".loading": "EnvironmentChoice choose_environment environments find_environment register_environment",
        ".playing": "PlayedEnvironment episode_seed",
    },
)
