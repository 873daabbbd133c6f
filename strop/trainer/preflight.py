"""A few dozen samples through the real path of a run, before it starts: the samples of its own first step."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.algorithms.advantages import adv_estimator_declaration
from strop.controller import as_batch, as_future
from strop.data.sampler import visit_uid
from strop.health import Check, Probe, examine
from strop.protocol import columns
from strop.run import SampleStore
from strop.trainer.config import Config
from strop.trainer.experience import experience_of
from strop.trainer.roles import Roles, check_models, make_roles, start_runtime
from strop.trainer.setup import load_training_data, set_threads, training_sampling
from strop.trajectory import Prompt
from strop.workers.reports import Decided, EpisodeReport
from strop.workers.rollout import prompts_as_rows, reports_of

_STEP = 1


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What a preflight found."""

    checks: list[Check]
    samples: list[dict[str, Any]]
    """Rows of the sample store, in the order of prompts and samples."""
    seconds: float
    """Wall-clock time, loading included."""

    @property
    def is_fine(self) -> bool:
        """Every check is."""
        return all(check.is_fine for check in self.checks)


def run_preflight(config: Config, *, num_prompts: int) -> Preflight:
    """Play the first prompts of a run and look at what would be trained. Nothing is written or trained.

    Args:
        config: of the run.
        num_prompts: how many prompts to play; each has rollout.samples_per_prompt samples.

    Raises:
        ValueError, FileNotFoundError: the sentence says what cannot be used.
    """
    start = time.perf_counter()
    set_threads(config.resources)
    data = load_training_data(config)
    check_models(config)
    visits = data.sampler.next(min(num_prompts, len(data.train.row_numbers)))
    prompts = [data.train.prompt(row, visit_uid(epoch, row)) for epoch, row in visits]
    with tempfile.TemporaryDirectory() as name, start_runtime(config, log_dir=None) as runtime:
        store = SampleStore(Path(name))
        roles = make_roles(
            config, runtime, num_steps=data.num_steps, checkpoint=None, version=0, samples=store.folder
        )
        played = roles.rollout.call.play(
            prompts_as_rows(prompts),
            config.rollout.samples_per_prompt,
            training_sampling(config, data.tokenizer),
        )
        reports = reports_of(played)
        difference = _log_prob_difference(config, roles, reports)
        decided = dict.fromkeys((report.id for report in reports), Decided(None, "filtered", "preflight"))
        roles.rollout.call.write_samples(_STEP, decided, split="train")
        samples = store.read(_STEP)
    probe = Probe(
        reports=reports,
        max_response_tokens=config.data.max_response_tokens,
        max_failed_share=config.reward.max_failed_share,
        is_group_relative=adv_estimator_declaration(config.algorithm.adv_estimator).is_group_relative,
        log_prob_difference=difference,
        num_changed_prompts=sum(not _is_stable(data.tokenizer, prompt) for prompt in prompts),
    )
    return Preflight(checks=examine(probe), samples=samples, seconds=time.perf_counter() - start)


def _log_prob_difference(config: Config, roles: Roles, reports: list[EpisodeReport]) -> float | None:
    """Largest difference between the log-probs recorded while sampling and the trainer's."""
    rollout_rows = as_future(roles.rollout.call.rows())
    experience = experience_of(rollout_rows, reports, on_error=config.reward.on_error)
    if not experience.reports:
        return None
    computed = as_future(roles.actor.call.compute_log_prob(as_batch(experience.cut(roles.actor.mesh))))
    ours = columns.flat(computed.get().tensors()["old_log_probs"])
    recorded = experience.rows.select(["rollout_log_probs", "response_mask"]).get().tensors()
    sampled = columns.flat(recorded["response_mask"]).bool()
    theirs = columns.flat(recorded["rollout_log_probs"])
    return float((ours - theirs)[sampled].abs().max())


def _is_stable(tokenizer: Any, prompt: Prompt) -> bool:
    ids = list(prompt.token_ids)
    return list(tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)) == ids
