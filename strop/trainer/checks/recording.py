"""Recorded samples that are trained on (trainer.skip_rollout): whether they are those of the run."""

from __future__ import annotations

from strop.data.visit_ids import visit_uid
from strop.run import RunError, RunFolder, is_run
from strop.trainer.config import Config
from strop.trainer.setup import TrainingData
from strop.utils.setting_text import setting_text
from strop.workers.replayed_samples import open_recording

_SAMPLING = ("temperature", "top_p", "top_k")


def check_recording(config: Config, data: TrainingData, *, first_step: int) -> None:
    """Refuse recorded samples (trainer.skip_rollout) that do not fit the run.

    Args:
        config, data: of the run.
        first_step: that is done next.

    Raises:
        RunError: there are too few, or they were sampled otherwise, from other prompts or with another tokenizer.
    """
    name = config.trainer.skip_rollout
    if not name:
        return
    recording = open_recording(name, config.reward)
    num_steps = len(recording.steps)
    if data.num_steps > num_steps:
        raise RunError(
            f"trainer.skip_rollout={name} holds samples of {num_steps} steps, and the run has {data.num_steps}: set "
            f"trainer.max_steps={num_steps}, or record more"
        )
    if is_run(name):
        _check_sampling(config)
    if first_step == 1 and not config.data.streaming:
        rows = data.sampler.order(0)[: config.data.prompts_per_step]
        for row in rows:
            prompt = data.train.prompt(row, visit_uid(0, row))
            recording.read_episode(prompt, config.rollout.samples_per_prompt - 1)


def _check_sampling(config: Config) -> None:
    """Log-probs are those of the distribution that was sampled from."""
    name = config.trainer.skip_rollout
    with RunFolder.open(name, read_only=True) as run:
        theirs = run.info["config"].get("rollout", {})
    for key in _SAMPLING:
        mine = getattr(config.rollout, key)
        if isinstance(theirs, dict) and key in theirs and theirs[key] != mine:
            recorded = f"rollout.{key}={setting_text(theirs[key])}"
            raise RunError(
                f"trainer.skip_rollout={name} was sampled with {recorded}, and this run has {setting_text(mine)}: its "
                f"log-probs would be those of another distribution; set {recorded}"
            )
