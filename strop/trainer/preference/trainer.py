"""The steps of a training on preferences; all else is that of a fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.algorithms.losses.preference import Batch, Weighed, weigh
from strop.algorithms.preference_loss_config import WITHOUT_REFERENCE
from strop.controller import RoleSpec, as_list, role
from strop.data.preference_rows import PreferenceDataset, PreferenceExample
from strop.data.readers import read_rows
from strop.engines.model import check_language_model
from strop.engines.value_models import check_value_model
from strop.protocol import DataProto
from strop.run import digest
from strop.trainer.config import Config
from strop.trainer.sft.trainer import SupervisedTrainer, make_sft_batch
from strop.trainer.timing import Stages
from strop.utils.metrics import Metric
from strop.workers.models import TrainingInit
from strop.workers.preference import PreferenceWorker
from strop.workers.rows import Update, merged_update

PREFERENCE = Metric(
    "prefer/<what>",
    "nats; the rewards of `rewards/` as the loss sees them",
    "of `strop prefer`: `loss`, `rewards/{chosen,rejected,margins,accuracies}`, `logps/{chosen,rejected}`, `kl`; "
    "with prefer.loss=kto of good and bad answers",
)
VALIDATION = Metric(
    "val/prefer/<what>", "as `prefer/<what>`", "the same of all held-out rows, as if they were one batch"
)
REFERENCE = "reference.safetensors"
"""File of the run folder: log-probs of all answers under the model that the run began with."""


class PreferenceTrainer(SupervisedTrainer):
    """Trainer on preferences."""

    name = "prefer"
    loss = PREFERENCE.of("loss")

    def _check_model(self) -> None:
        """Refuse a model that cannot be trained so, before it is loaded."""
        if self._sft.loss == "reward":
            check_value_model(self._config.model)
        else:
            check_language_model(self._config.model)

    def _own_section(self, config: Config) -> Any:
        return config.prefer

    def _source_weights(self) -> Mapping[str, float]:
        return {}

    def _load(self, data: Any, files: Sequence[str], split: str) -> PreferenceDataset:
        rows = read_rows(files, self._config.data.cache_dir)
        dataset = PreferenceDataset(rows, self._tokenizer, data, loss=self._sft.loss, split=split)
        self._report_data(dataset, split)
        return dataset

    def _role(self, learning: TrainingInit) -> RoleSpec[Any]:
        sft = self._sft
        scores = sft.loss == "reward"
        return role(PreferenceWorker, self._config.model, sft.engine, sft.optim, learning, scores=scores)

    def _begin(self) -> None:
        """Compute the starting model's numbers for all answers; a resume finds them in the run folder."""
        splits = {"train": self._examples} | ({} if self._val is None else {"val": self._val})
        if self._sft.loss in WITHOUT_REFERENCE:
            self._reference = {name: torch.zeros(len(split), 2).double() for name, split in splits.items()}
            return
        path = self._run.path / REFERENCE
        if not path.exists():
            if self._start_step:
                raise ValueError(
                    f"{path} is gone: without what the starting model says of the answers the run cannot go on; begin "
                    f"another one with --from"
                )
            numbers = {
                name: self._numbers([split[i] for i in range(len(split))]) for name, split in splits.items()
            }
            unfinished = path.with_suffix(".tmp")
            save_file(numbers, unfinished, metadata={"rows": _digest_of_rows(splits)})
            unfinished.replace(path)
        self._reference = load_file(path)
        with safe_open(path, framework="pt") as opened:
            rows = (opened.metadata() or {}).get("rows")
        is_about_others = rows is not None and rows != _digest_of_rows(splits)
        if is_about_others or any(
            len(self._reference.get(name, ())) != len(split) for name, split in splits.items()
        ):
            raise ValueError(
                f"{path} is not about the rows of this run, whose tokens have changed since it began: put them back, "
                f"or begin another run with --from"
            )

    def _numbers(self, examples: Sequence[PreferenceExample]) -> Tensor:
        """[n, 2] float64: what the model says of these examples now."""
        size = self._sft.examples_per_update
        parts = [
            self._worker.call.compute_numbers(preference_batch(examples[start : start + size]))
            for start in range(0, len(examples), size)
        ]
        return torch.cat([part.tensors()["numbers"] for part in parts]).reshape(-1, 2)

    def _weighed(self, examples: Sequence[PreferenceExample], places: Sequence[int], split: str) -> Weighed:
        lengths = [[float(sum(side.loss_mask)) for side in example.pair] for example in examples]
        batch = Batch(
            numbers=self._numbers(examples),
            reference=self._reference[split][list(places)],
            lengths=torch.tensor(lengths, dtype=torch.float64),
            margins=torch.tensor([example.margin for example in examples], dtype=torch.float64),
            is_good=torch.tensor([example.is_good for example in examples]),
        )
        return weigh(self._sft, batch)

    def _learned(
        self, places: Sequence[int], stages: Stages
    ) -> tuple[DataProto, Update, Mapping[str, float]]:
        """Along the gradients of the numbers of both answers, as the loss weighs them."""
        examples = [self._examples[index] for index in places]
        num_sides = 1 if self._sft.loss == "kto" else 2  # answers to other prompts are not trained
        batch = preference_batch(examples, num_sides)
        with stages.stage("numbers"):
            weighed = self._weighed(examples, places, "train")
        weights = DataProto.from_dict({"weights": weighed.weights[:, :num_sides].flatten()})
        with stages.stage("update"):
            update = merged_update(as_list(self._worker.call.update(batch.union(weights))))
        return batch, update, _named(PREFERENCE, weighed)

    def _validate(self, dataset: PreferenceDataset, step: int) -> dict[str, float]:
        """The numbers of a step, of all held-out rows."""
        places = range(len(dataset))
        weighed = self._weighed([dataset[i] for i in places], places, "val")
        accuracy = weighed.metrics.get("rewards/accuracies")
        self._run.events.append("validation", step, loss=weighed.loss, accuracy=accuracy)
        return _named(VALIDATION, weighed)


def _named(metric: Metric, weighed: Weighed) -> dict[str, float]:
    return {metric.of(name): value for name, value in {"loss": weighed.loss, **weighed.metrics}.items()}


def preference_batch(examples: Sequence[PreferenceExample], num_sides: int = 2) -> DataProto:
    """Both conversations of examples, or the first ones: columns prompts [B, P~] and responses, loss_mask [B, R~]."""
    return make_sft_batch([side for example in examples for side in example.pair[:num_sides]])


def _digest_of_rows(splits: Mapping[str, Sequence[PreferenceExample]]) -> str:
    """Digest of the tokens of every answer, in order."""
    parts: list[str | Sequence[int]] = []
    for name, examples in splits.items():
        parts.append(name)
        for index in range(len(examples)):
            parts += [side.token_ids for side in examples[index].pair]
    return digest(*parts)
