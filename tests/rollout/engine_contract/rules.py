"""All rules, in the order in which they are tried."""

from __future__ import annotations

from rollout.engine_contract.case import Rule
from rollout.engine_contract.generation import GENERATION
from rollout.engine_contract.requests import LAST, REQUESTS
from rollout.engine_contract.weights import WEIGHTS

RULES: tuple[Rule, ...] = (*GENERATION, *REQUESTS, *WEIGHTS, *LAST)
"""Parametrize a test over them, and `EngineCase.check` each on an engine that a fixture keeps for all."""
