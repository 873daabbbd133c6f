"""A certificate of the environments that a run plays, made before its first step and kept in its event log."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from strop.agents.envs import choose_environment
from strop.agents.envs.agent import row_of
from strop.agents.envs.certificate import Inspection
from strop.agents.envs.config import ENV_AGENT
from strop.run import RunFolder
from strop.trainer.callbacks import Reporter
from strop.trainer.config import Config
from strop.trainer.setup import TrainingData

NUM_SEEDS, MAX_ENVIRONMENTS, LIMIT_S = 3, 4, 30.0
"""Episodes of each player; environments of one run, and seconds for each of them."""
_NUM_PROMPTS = 64
"""First prompts of the data, among which environments are looked for."""
EVENT = "environment"


def certify_environments(config: Config, data: TrainingData, run: RunFolder, say: Reporter) -> None:
    """Inspect the environments of the first prompts; a record per environment, and a line per fault.

    A fault does not end the run: an environment may have its reasons.
    """
    chosen = config.agent.environment
    rows: dict[str, list[dict[str, Any]]] = {}
    for number in list(data.train.row_numbers[:_NUM_PROMPTS]):
        prompt = data.train.prompt(number, f"check-{number:06d}")
        if prompt.agent_name == ENV_AGENT:
            row = row_of(prompt)
            name = choose_environment(row, name=chosen.name, kwargs=chosen.kwargs).name
            rows.setdefault(name, []).append(row)
    for name, of_it in list(rows.items())[:MAX_ENVIRONMENTS]:
        choice = choose_environment(
            {},
            name=name,
            kwargs=chosen.kwargs if name == chosen.name else {},
        )
        inspection = Inspection(
            choice,
            rows=of_it[:NUM_SEEDS],
            num_seeds=NUM_SEEDS,
            num_at_once=NUM_SEEDS,
            max_turns=config.agent.max_assistant_turns or 16,
            timeout_s=config.agent.tool_timeout_s,
        )
        started = time.monotonic()
        try:
            certificate = asyncio.run(asyncio.wait_for(inspection.run(), LIMIT_S)).as_json()
        except TimeoutError:
            certificate = {
                "environment": name,
                "faults": [],
                "notes": [f"not inspected within {LIMIT_S:g} s"],
            }
        run.events.append(EVENT, 0, fsync=True, certificate=certificate)
        seconds = time.monotonic() - started
        count = len(certificate["faults"])
        say(f"environment {name}: {count} fault{'' if count == 1 else 's'}, checked in {seconds:.1f} s")
        for fault in certificate["faults"]:
            say(f"  {fault}")
    if (left := len(rows) - MAX_ENVIRONMENTS) > 0:
        say(f"environments that were not checked: {left} more among the first {_NUM_PROMPTS} prompts")
