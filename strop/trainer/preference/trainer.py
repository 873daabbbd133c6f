"""Training on preferences: the loss of a step and of the held-out rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.algorithms.losses.preference import Batch, Weighed, weigh
from strop.algorithms.preference_loss_config import WITHOUT_REFERENCE
from strop.controller import RoleSpec, as_list, role
from strop.data.preference_config import PreferConfig
from strop.data.preference_rows import PreferenceDataset, PreferenceExample
from strop.data.readers import read_rows
from strop.engines.model import check_language_model
from strop.engines.value_models import check_value_model, padding_token
from strop.protocol import DataProto
from strop.run import Checkpoint, RunFolder, digest
from strop.trainer.callbacks import Reporter
from strop.trainer.config import Config
from strop.trainer.environment import environment_of
from strop.trainer.fault_tolerance.signals import SignalRequest
from strop.trainer.sft.result import SftResult
from strop.trainer.sft.trainer import make_sft_batch
from strop.trainer.supervised import SupervisedTrainer
from strop.trainer.timing import Stages
from strop.utils.atomic_io import share_as_usual
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


class PreferenceTrainer(SupervisedTrainer[PreferConfig, PreferenceDataset, PreferenceWorker]):
    """Trainer on preferences."""

    name = "prefer"
    loss = PREFERENCE.of("loss")

    def _check_model(self) -> None:
        if self._settings.loss == "reward":
            check_value_model(self._config.model)
        else:
            check_language_model(self._config.model)

    def _section(self, config: Config) -> PreferConfig:
        return config.prefer

    def _load(self, files: Sequence[str], split: str) -> PreferenceDataset:
        rows = read_rows(files, self._config.data.cache_dir)
        settings = self._settings
        dataset = PreferenceDataset(
            rows,
            self._tokenizer,
            settings.data,
            loss=settings.loss,
            split=split,
            padding=padding_token(self._config.model),
        )
        self._report_data(dataset, split)
        return dataset

    def _role(self, learning: TrainingInit) -> RoleSpec[PreferenceWorker]:
        settings = self._settings
        scores = settings.loss == "reward"
        padding = self._padding_to_save() if scores else None
        return role(
            PreferenceWorker,
            self._config.model,
            settings.engine,
            settings.optim,
            learning,
            scores=scores,
            padding=padding,
        )

    def _padding_to_save(self) -> int | None:
        """The model's padding token; else the tokenizer's, where no conversation is scored at one."""
        named, padding = padding_token(self._config.model), self._tokenizer.pad_token_id
        if named is not None or padding is None:
            return named
        splits = [self._examples] + ([] if self._val is None else [self._val])
        scored = {side.token_ids[-2] for split in splits for i in range(len(split)) for side in split[i].pair}
        return None if padding in scored else int(padding)

    @property
    def _rows_per_update(self) -> int:
        return 2 * self._settings.examples_per_update  # of a pair

    def _begin(self) -> None:
        """Compute the starting model's numbers for all answers; a resume finds them in the run folder."""
        splits = {"train": self._examples} | ({} if self._val is None else {"val": self._val})
        if self._settings.loss in WITHOUT_REFERENCE:
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
            share_as_usual(unfinished)
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
        size = self._settings.examples_per_update
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
        return weigh(self._settings, batch)

    def _learn(self, places: Sequence[int], stages: Stages) -> tuple[DataProto, Update, Mapping[str, float]]:
        """Along the gradients of the numbers of both answers, as the loss weighs them."""
        examples = [self._examples[index] for index in places]
        num_sides = 1 if self._settings.loss == "kto" else 2  # answers to other prompts are not trained
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


def _digest_of_rows(splits: Mapping[str, PreferenceDataset]) -> str:
    """Digest of the tokens of every answer, in order."""
    parts: list[str | Sequence[int]] = []
    for name, examples in splits.items():
        parts.append(name)
        for index in range(len(examples)):
            parts += [side.token_ids for side in examples[index].pair]
    return digest(*parts)


def train_on_preferences(
    config: Config,
    run: RunFolder,
    *,
    checkpoint: Checkpoint | None = None,
    say: Reporter,
) -> SftResult:
    """Run a training on preferences to its end; arguments as those of `strop.trainer.train.train`."""
    stop = SignalRequest()
    with environment_of(config.resources), stop.listening():
        return PreferenceTrainer(config, run, checkpoint=checkpoint, say=say, stop=stop).fit()
