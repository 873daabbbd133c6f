"""Rehearsal of the longest batch: before the first step, passes of each role that learns over rows as long as they may
be, which show that they fit, how long they take, and with how much memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from strop.controller import WorkerGroup, as_list
from strop.engines.config import EngineConfig
from strop.run import RunFolder
from strop.run.folder import REHEARSAL
from strop.trainer.callbacks import Reporter
from strop.trainer.config import Config, UpdateSettings
from strop.trainer.role_specs import role_mesh
from strop.trainer.sections import TrainerConfig
from strop.trainer.worker_groups import WorkerGroups
from strop.utils.device import device_name
from strop.workers.models import TrainedWorker
from strop.workers.rehearsal import Group, Rehearsal

GIB = 1 << 30
SPARE_SHARE = 0.05
"""Of an accelerator's memory: what lies between tensors, and what libraries take."""


def is_rehearsed(trainer: TrainerConfig, device: str) -> bool:
    """The settings ask for a rehearsal; `device` as resources.device."""
    asked = trainer.rehearse_longest_batch
    return asked if isinstance(asked, bool) else device_name(device) != "cpu"


def rehearse_roles(config: Config, roles: WorkerGroups, run: RunFolder, step: int, say: Reporter) -> None:
    """Rehearse every role that learns, the policy last; each finds all others as they are in a step.

    Args:
        config, roles, run: of the run.
        step: that it begins or goes on at.
        say: takes a line for each role.
    """
    if "rollout" not in config.resources.apart:
        roles.rollout.call.sleep()
    trained = roles.trained()
    for name, group in trained.items():
        with roles.on_device(name):
            group.call.make_optimizer_state()
    found: dict[str, Rehearsal] = {}
    for name, group in reversed(trained.items()):
        with roles.on_device(name):
            found[name] = rehearse(name, group, longest_batch(config, name), run, step, say)
    left = bytes_left(found, config.resources.apart)
    if "rollout" not in config.resources.apart and left is not None:
        roles.rollout.call.leave_for_updates(left)


def bytes_left(found: Mapping[str, Rehearsal], apart: Collection[str]) -> int | None:
    """Bytes of the accelerator that updates leave to generation, which held nothing while they were rehearsed; None of
    a CPU.

    Args:
        found: of each role that learns.
        apart: roles on devices of their own, whose memory generation does not share.
    """
    left = [
        int((1 - SPARE_SHARE) * one.total_bytes) - one.peak_bytes
        for name, one in found.items()
        if name not in apart and one.total_bytes is not None and one.peak_bytes is not None
    ]
    return max(0, min(left)) if left else None


def rehearse(
    role: str,
    group: WorkerGroup[TrainedWorker],
    batch: Sequence[Group],
    run: RunFolder,
    step: int,
    say: Reporter,
) -> Rehearsal:
    """Rehearse one role on rows of these lengths, and report it; the most that a rank has needed."""
    ranks: list[Rehearsal] = as_list(group.call.rehearse(batch))
    found = replace(
        max(ranks, key=lambda rank: rank.peak_bytes or 0),
        num_micro_batches=max(rank.num_micro_batches for rank in ranks),
        tokens=max(rank.tokens for rank in ranks),
        seconds=max(rank.seconds for rank in ranks),
    )
    say(f"rehearsal: {role}: {_described(found)}")
    run.events.append(
        REHEARSAL,
        step,
        role=role,
        micro_batches=found.num_micro_batches,
        tokens=found.tokens,
        seconds=found.seconds,
        peak_bytes=found.peak_bytes,
        total_bytes=found.total_bytes,
    )
    return found


def _described(found: Rehearsal) -> str:
    noun = "micro-batch" if found.num_micro_batches == 1 else "micro-batches"
    line = f"{found.num_micro_batches} {noun} of up to {found.tokens} tokens in {found.seconds:.1f} s"
    if found.peak_bytes is None:
        return line
    if found.total_bytes is None:
        return f"{line}; most memory of the process so far {found.peak_bytes / GIB:.2f} GiB"
    return f"{line}, with at most {found.peak_bytes / GIB:.2f} of {found.total_bytes / GIB:.1f} GiB"


def longest_batch(config: Config, role: str) -> list[Group]:
    """Groups of a rank in an update of a role, with prompts and answers as long as they may be: as many as fill the
    micro-batches that are there together, or as an update has."""
    engine = config.engines[role]
    learner = _learners(config)[role]
    prompt, response = config.data.max_prompt_tokens, config.data.max_response_tokens
    num_rows = -(-config.samples_per_update(learner) // role_mesh(config, role, engine).dp)
    enough = tokens_together(engine)
    of_group = min(config.rollout.samples_per_prompt, num_rows, max(1, -(-enough // max(1, response - 1))))
    num_groups = min(-(-num_rows // of_group), -(-enough // (prompt + of_group * (response - 1))))
    return [(prompt, (response,) * of_group)] * num_groups


def _learners(config: Config) -> Mapping[str, UpdateSettings]:
    """Settings of the roles that learn."""
    return {"actor": config.actor, "critic": config.critic, "prm": config.prm}


def tokens_together(engine: EngineConfig) -> int:
    """Tokens of the micro-batches that a rehearsal needs: the second one finds the gradient of the first, and a
    pipeline holds one of each stage."""
    shared = engine.sequence_parallel * engine.context_parallel
    return max(2, engine.pipeline_parallel * engine.pipeline_chunks) * engine.max_tokens_per_device * shared
