"""The steps of a training on preferences; all else is that of a fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.base.metrics import Metric, metric_values
from strop.controller import RoleSpec, as_list, role
from strop.data.readers import read_rows
from strop.data.sampler import visit_uid
from strop.engines.model import check_language_model
from strop.preferences.config import WITHOUT_REFERENCE, PreferConfig
from strop.preferences.losses import Batch, Weighed, weigh
from strop.preferences.rows import Compared, PreferenceDataset
from strop.preferences.worker import PreferenceWorker
from strop.protocol import DataProto, columns
from strop.roles.value_models import check_value_model
from strop.run import Checkpoint, Fate, RunFolder, digest
from strop.supervised.result import SftResult
from strop.supervised.trainer import SupervisedTrainer
from strop.trainer.config import Config
from strop.trainer.launch import Say
from strop.trainer.stages import Stages
from strop.trainer.stopping import StopRequest
from strop.workers.metrics import THROUGHPUT, TIMING
from strop.workers.models import Learning
from strop.workers.rows import GRAD_NORM, merged_update

PREFERENCE = Metric(
    "prefer/<what>",
    "nats; the rewards of `rewards/` as the loss sees them",
    "of `strop prefer`: `loss`, `rewards/{chosen,rejected,margins,accuracies}`, `logps/{chosen,rejected}`, `kl`; "
    "with loss=kto of good and bad answers",
)
VALIDATION = Metric(
    "val/prefer/<what>", "as `prefer/<what>`", "the same of all held-out rows, as if they were one batch"
)
REFERENCE = "reference.safetensors"
"""File of the run folder: log-probs of all answers under the model that the run began with."""


class PreferenceTrainer(SupervisedTrainer):
    """One training on preferences."""

    name = "prefer"
    section = PreferConfig

    def _check_model(self) -> None:
        """Refuse a model that cannot be trained so, before it is loaded."""
        if self._sft.loss == "reward":
            check_value_model(self._config.model)
        else:
            check_language_model(self._config.model)

    def _source_weights(self) -> Mapping[str, float]:
        return {}

    def _load(self, data: Any, files: Sequence[str], split: str) -> PreferenceDataset:
        rows = read_rows(files, self._config.data.cache_dir)
        dataset = PreferenceDataset(rows, self._tokenizer, data, loss=self._sft.loss, split=split)
        self._say(dataset.report())
        return dataset

    def _role(self, learning: Learning) -> RoleSpec[Any]:
        sft = self._sft
        scores = sft.loss == "reward"
        return role(PreferenceWorker, self._config.model, sft.engine, sft.optim, learning, scores=scores)

    def _begin(self) -> None:
        """What the starting model says of all answers; a resume finds it in the run folder."""
        splits = {"train": self._examples} | ({} if self._val is None else {"val": self._val})
        if self._sft.loss in WITHOUT_REFERENCE:
            self._reference = {name: torch.zeros(len(one), 2).double() for name, one in splits.items()}
            return
        path = self._run.path / REFERENCE
        if not path.exists():
            if self._start_step:
                raise ValueError(
                    f"{path} is gone: without what the starting model says of the answers the run cannot go on; begin "
                    f"another one with --from"
                )
            found = {name: self._numbers([one[i] for i in range(len(one))]) for name, one in splits.items()}
            unfinished = path.with_suffix(".tmp")
            save_file(found, unfinished)
            unfinished.replace(path)
        self._reference = load_file(path)
        for name, one in splits.items():
            if len(self._reference.get(name, ())) != len(one):
                raise ValueError(f"{path} is not about the rows of this run: begin another run")

    def _numbers(self, examples: Sequence[Compared]) -> Tensor:
        """[n, 2] float64: what the model says of these examples now."""
        size = self._sft.examples_per_update
        parts = [
            self._worker.call.compute_numbers(preference_batch(examples[start : start + size]))
            for start in range(0, len(examples), size)
        ]
        return torch.cat([part.tensors()["numbers"] for part in parts]).reshape(-1, 2)

    def _weighed(self, examples: Sequence[Compared], places: Sequence[int], split: str) -> Weighed:
        lengths = [[float(sum(side.loss_mask)) for side in one.pair] for one in examples]
        batch = Batch(
            numbers=self._numbers(examples),
            reference=self._reference[split][list(places)],
            lengths=torch.tensor(lengths, dtype=torch.float64),
            margins=torch.tensor([one.margin for one in examples], dtype=torch.float64),
            is_good=torch.tensor([one.is_good for one in examples]),
        )
        return weigh(self._sft, batch)

    def _step(self, step: int) -> dict[str, float]:
        stages = Stages()
        visits = self._sampler.next()
        ids = [f"{visit_uid(epoch, row)}/0" for epoch, row in visits]
        self._run.ledger.issue(step, ids)
        places = [row for _, row in visits]
        examples = [self._examples[row] for row in places]
        num_sides = 1 if self._sft.loss == "kto" else 2  # answers to other prompts are not trained
        batch = preference_batch(examples, num_sides)
        with stages.stage("numbers"):
            weighed = self._weighed(examples, places, "train")
        weights = DataProto.from_dict({"weights": weighed.weights[:, :num_sides].flatten()})
        with stages.stage("update"):
            update = merged_update(as_list(self._worker.call.update(batch.union(weights))))
        skipped = update.skipped
        if skipped:
            self._run.events.append("skipped_update", step, reason=skipped)
            self._say(f"step {step} skipped an update: {skipped}")
        fate = Fate("filtered", skipped) if skipped else Fate("trained")
        self._run.ledger.settle(step, dict.fromkeys(ids, fate))
        numbers = metric_values(update.metrics)
        numbers |= _named(PREFERENCE, weighed)
        prompts, responses = (columns.flat(batch.tensors()[name]) for name in ("prompts", "responses"))
        self._run.fingerprints.append(
            step,
            data=digest(ids),
            prompt_tokens=digest(prompts.numpy(), responses.numpy()),
            loss=digest([weighed.loss.hex(), numbers[GRAD_NORM.of("train")].hex()]),
            weights=as_list(self._worker.call.checksum())[0],
        )
        numbers[TIMING.of("step")] = stages.total()
        numbers[THROUGHPUT] = (len(prompts) + len(responses)) / stages.total()
        self._run.events.append(
            "step", step, seconds=stages.total(), phases=stages.seconds, loss=weighed.loss
        )
        return numbers

    def _validate(self, dataset: PreferenceDataset, step: int) -> dict[str, float]:
        """The numbers of a step, of all held-out rows."""
        places = range(len(dataset))
        weighed = self._weighed([dataset[i] for i in places], places, "val")
        accuracy = weighed.metrics.get("rewards/accuracies")
        self._run.events.append("validation", step, loss=weighed.loss, accuracy=accuracy)
        return _named(VALIDATION, weighed)


def _named(metric: Metric, weighed: Weighed) -> dict[str, float]:
    return {metric.of(name): value for name, value in {"loss": weighed.loss, **weighed.metrics}.items()}


def preference_batch(examples: Sequence[Compared], num_sides: int = 2) -> DataProto:
    """Both conversations of examples, or the first ones: columns prompts [B, P~] and responses, loss_mask [B, R~]."""
    prompts, responses, masks = [], [], []
    for example in examples:
        for side in example.pair[:num_sides]:
            cut = side.loss_mask.index(True)
            prompts.append(torch.tensor(side.token_ids[:cut]))
            responses.append(torch.tensor(side.token_ids[cut:]))
            masks.append(torch.tensor(side.loss_mask[cut:]))
    return DataProto.from_dict(
        {
            "prompts": columns.jagged(prompts),
            "responses": columns.jagged(responses),
            "loss_mask": columns.jagged(masks),
        },
        meta_info={"temperature": 1.0},
    )


def train_on_preferences(
    config: Config, run: RunFolder, *, checkpoint: Checkpoint | None = None, say: Say
) -> SftResult:
    """Run a training to its end; arguments as those of `strop.trainer.loop.train`."""
    stop = StopRequest()
    with stop.listening():
        return PreferenceTrainer(config, run, checkpoint=checkpoint, say=say, stop=stop).fit()
