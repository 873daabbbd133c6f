"""Building blocks of a custom training loop: prompts, rollout, columns, updates, weight sync.

`Pieces` starts the roles of a configuration, in this process or on a cluster, and leaves the order of things to the
caller. `strop.train` is one such loop, with a run folder, a resume and a health report around it; here there are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from strop.api.overrides import Settings, overrides_of
from strop.compat.key_aliases import key_aliases
from strop.controller import as_list
from strop.data.prompt_loader import next_prompts
from strop.protocol import DataProto, jagged
from strop.protocol.schema import COLUMNS, made_by
from strop.protocol.trajectory import Prompt
from strop.trainer.checkpointing import write_model
from strop.trainer.checks.models import check_models
from strop.trainer.collecting import training_rows
from strop.trainer.config import Config
from strop.trainer.loading import load
from strop.trainer.role_columns import add_columns
from strop.trainer.rollout_batch import RolloutBatch, optimizer_batches
from strop.trainer.setup import load_training_data, sampling_of
from strop.trainer.timing import Stages
from strop.trainer.undecided import UndecidedSources
from strop.trainer.validation import Validation, summarize_validation
from strop.trainer.worker_groups import WorkerGroups, make_worker_groups, rollout_settings, start_runtime
from strop.workers.reports import EpisodeReport, check_failed_episodes
from strop.workers.rows import merged_update


@dataclass(frozen=True)
class Samples:
    """Answers that were played and scored; their tokens stay with the workers."""

    batch: RolloutBatch
    """The rows that are trained on; a sample has several where its history was rewritten on the way."""
    reports: tuple[EpisodeReport, ...] = field(repr=False)
    """Report on the episode of each sample, without its tokens."""
    rewards: Tensor
    """[samples] float32: what each is worth."""

    def __len__(self) -> int:
        return len(self.reports)

    def groups(self) -> list[list[int]]:
        """The numbers of the samples of each prompt."""
        rows_of: dict[str, list[int]] = {}
        for number, report in enumerate(self.reports):
            rows_of.setdefault(report.uid, []).append(number)
        return list(rows_of.values())

    def with_advantages(self, advantages: Tensor) -> Samples:
        """The same samples, each of whose tokens has the advantage of its sample.

        Args:
            advantages: [samples].

        Raises:
            ValueError: their number is another one, or one is not finite.
        """
        if advantages.shape != (len(self),) or not bool(advantages.isfinite().all()):
            raise ValueError(
                f"the advantages have shape {list(advantages.shape)} and {int((~advantages.isfinite()).sum())} numbers "
                f"that are not finite: give one finite number for each of {len(self)} samples"
            )
        values = dict(zip((report.episode_id for report in self.reports), advantages.tolist(), strict=True))
        rows = [torch.full((row.num_response_tokens,), values[row.episode_id]) for row in self.batch.reports]
        column = DataProto.from_dict({"advantages": jagged(rows)})
        return replace(self, batch=self.batch.union(column, "advantages"))

    def split(self, at_most: int) -> Iterator[Samples]:
        """Parts of at most so many samples, of equal sizes up to one, for several optimizer steps."""
        first = 0
        for part in optimizer_batches(self.batch, samples_per_update=at_most, epochs=1):
            after = first + len(part.sample_starts)
            yield Samples(part, self.reports[first:after], self.rewards[first:after])
            first = after


class Pieces:
    """The parts of a training, started; a context manager.

    `roles` has the worker groups themselves (`roles.actor.call.compute_log_prob(...)`), for what is not offered here.
    """

    def __init__(self, config: Config | str | Path | None = None, settings: Settings = ()) -> None:
        """Read configuration and data; the roles start with the `with` block.

        Args:
            config: a file of settings, or the settings themselves.
            settings: above them, as for `strop.train`.

        Raises:
            ConfigError, ValueError, FileNotFoundError: the sentence says what cannot be used.
        """
        self.config = (
            config
            if isinstance(config, Config)
            else load(config, overrides=overrides_of(settings), in_shell=False, aliases=key_aliases)
        )
        check_models(self.config)
        self.data = load_training_data(self.config)
        self.num_steps: int = self.data.num_steps
        """Steps that trainer.max_steps and trainer.num_epochs allow."""
        self.version = 0
        """Version of the weights that generate: the calls of `update_weights` so far."""
        self._undecided = UndecidedSources(self.config.reward)
        self.roles: WorkerGroups
        self._stack = ExitStack()

    def __enter__(self) -> Pieces:
        with ExitStack() as stack:
            runtime = stack.enter_context(start_runtime(self.config, log_dir=None))
            settings = rollout_settings(self.config)
            self.roles = make_worker_groups(self.config, runtime, settings, num_steps=self.num_steps)
            self._stages = Stages(self.roles)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def prompts(self, count: int) -> list[Prompt]:
        """The next prompts of data.train_files in the order of the sampler; fewer only at the end of the last epoch."""
        return next_prompts(self.data.train, self.data.sampler, count).prompts

    def play(self, prompts: Sequence[Prompt], samples_per_prompt: int) -> Samples:
        """Every prompt answered so often, and each answer scored; those that could not be are left out.

        Raises:
            EpisodesFailed, RewardError: too many failed.
        """
        sampling = sampling_of(self.config, self.config.rollout, self.data.tokenizer)
        episodes = self.roles.run_episodes(prompts, samples_per_prompt, sampling)
        check_failed_episodes(episodes.reports)
        batch = training_rows(self.config, self.roles, episodes, sampling)
        used = batch.episode_ids
        reports = tuple(report for report in episodes.reports if report.id in used)
        return Samples(batch, reports, torch.tensor([report.reward() or 0.0 for report in reports]))

    def with_columns(self, samples: Samples, *names: str) -> Samples:
        """The same samples, with columns that roles make: old_log_probs, ref_log_prob, values, rm_scores, ...

        Args:
            samples: as `play` gave them.
            names: of `strop.protocol.schema`.

        Raises:
            ValueError: no role makes such a column.
        """
        offered = [
            name for name, column in COLUMNS.items() if column.made_by not in ("rollout", "update_actor")
        ]
        for name in names:
            if name not in offered:
                raise ValueError(f"no role makes a column {name!r}; there are {', '.join(offered)}")
        batch = add_columns(samples.batch, names, self.config, self.roles, self._stages)
        if made_by("adv") & (set(names) - batch.column_names):
            with self._stages.stage("adv"):
                advantages = self.roles.actor.call.compute_advantages(batch.columns_for("advantages"))
                batch = batch.union(advantages, *made_by("adv"))
        return replace(samples, batch=batch)

    def update(self, samples: Samples, *, role: Literal["actor", "critic"] = "actor") -> dict[str, float]:
        """One optimizer step of the policy on these samples with the loss of `algorithm`; its metrics.

        Args:
            samples: with advantages; without old_log_probs, those of this very pass are the old ones.
            role: actor, or critic, which takes values and returns.

        Raises:
            ValueError: no sample is left to train on, or a column is missing.
        """
        batch, totals = samples.batch, samples.batch.totals()
        self._check(batch, role)
        if role == "critic" and (critic := self.roles.critic) is not None:
            with self._stages.stage("update", role):
                updates = tuple(as_list(critic.call.update_critic(batch.partition(critic.mesh), totals)))
        else:
            actor = self.roles.actor
            with self._stages.stage("update", role):
                updates = actor.call.update_policy(batch.partition(actor.mesh), totals).metrics
        return {name: metric.value for name, metric in merged_update(updates).metrics.items()}

    def _check(self, batch: RolloutBatch, role: str) -> None:
        """Refuse an update for which something is missing."""
        algorithm = self.config.algorithm
        if role == "critic" and self.roles.critic is None:
            raise ValueError(f"algorithm.adv_estimator={algorithm.adv_estimator} has no critic; gae has")
        if not batch.totals().num_tokens:
            raise ValueError("no sample has a token to train on: leave this optimizer step out")
        required = ["values", "returns"] if role == "critic" else ["advantages"]
        if role == "actor" and algorithm.use_kl_loss:
            required.append("ref_log_prob")
        missing = [name for name in required if name not in batch.column_names]
        if missing:
            reason = " (algorithm.use_kl_loss)" if "ref_log_prob" in missing else ""
            raise ValueError(
                f"the update of the {role} needs the columns {', '.join(missing)}{reason}: make them with "
                f"with_columns(samples, {', '.join(map(repr, missing))})"
            )

    def update_weights(self) -> int:
        """Let generation use the weights of now; their version."""
        self.version += 1
        self.roles.sync.update(self.version)
        return self.version

    def validate(self) -> Validation:
        """The pass rate on data.val_files, with `eval`'s way of answering.

        Raises:
            ValueError: there are no such files.
            EpisodesFailed: too many answers failed.
        """
        if not self.data.val_prompts:
            raise ValueError("data.val_files is empty, so there is nothing to validate on")
        sampling = sampling_of(self.config, self.config.eval, self.data.tokenizer)
        played = self.roles.run_episodes(self.data.val_prompts, self.config.eval.samples_per_prompt, sampling)
        check_failed_episodes(played.reports)
        self._undecided.observe(self.version, played.reports)
        return summarize_validation(played.reports, undecided=self._undecided.names)

    def save(self, folder: str | Path) -> Path:
        """The policy as a Hugging Face folder, which every command reads."""
        folder = Path(folder).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        write_model(self.roles.actor, folder, tokenizer=self.data.tokenizer, source=self.config.model.path)
        return folder

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model."""
        return self.data.tokenizer
