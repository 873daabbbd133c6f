"""Supervised fine-tuning: the loss of a step and of the held-out rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from strop.algorithms.aggregation import BatchTotals, batch_totals
from strop.controller import RoleSpec, as_list, role
from strop.data.mixture import weighted_epochs, weights_of_sources
from strop.data.sampler import PromptSampler
from strop.data.sft.config import SftConfig
from strop.data.sft.dataset import SftDataset
from strop.data.sft.rows import read_sft_rows
from strop.data.sft.stored_conversation import SftExample
from strop.engines.config import ModelConfig
from strop.engines.model import check_language_model
from strop.engines.multimodal.families import media_token_ids, takes_media
from strop.engines.pretrained_config import load_model_config
from strop.protocol import DataProto, columns
from strop.run import Checkpoint, RunFolder
from strop.trainer.callbacks import Reporter, StopRequest
from strop.trainer.checks.parallel import check_router_settings
from strop.trainer.config import Config
from strop.trainer.environment import environment_of
from strop.trainer.fault_tolerance.signals import SignalRequest
from strop.trainer.sft.result import SftResult
from strop.trainer.supervised import SupervisedTrainer
from strop.trainer.timing import Stages
from strop.utils.metrics import Metric
from strop.utils.sanitize import as_number
from strop.workers.models import TrainingInit
from strop.workers.routers import check_routers
from strop.workers.rows import Update, flat_mask, merged_update
from strop.workers.sft import LOSS, TEACHER, SupervisedWorker

VALIDATION_LOSS = Metric(
    "val/loss", "nats", "of `strop sft` on held-out rows: -log p, mean over trained tokens"
)


class SftTrainer(SupervisedTrainer[SftConfig, SftDataset, SupervisedWorker]):
    """Trainer on conversations that are imitated, token by token, or on a teacher's distribution of them."""

    name = "sft"
    loss = LOSS

    def _section(self, config: Config) -> SftConfig:
        return config.sft

    def _check_settings(self) -> None:
        super()._check_settings()
        settings, every = self._settings, self._config.eval.every
        if settings.target_loss is not None and not (settings.data.val_files and every):
            raise ValueError(
                f"sft.target_loss is {settings.target_loss:g}, but no validation could end the run there: name "
                f"held-out rows in sft.data.val_files (now {list(settings.data.val_files)}), and in eval.every after "
                f"how many steps they are looked at (now {every})"
            )

    def _begin(self) -> None:
        """Find the last validation in the records of a run that goes on."""
        validations = self._run.events.read("validation")
        last = validations[-1] if validations else {"step": 0, "loss": math.inf}
        self._validated = last["step"], as_number(last["loss"])

    def _check_model(self) -> None:
        check_language_model(self._config.model)
        moe = self._settings.moe
        check_router_settings("sft", self._settings.engine, moe)
        if moe.is_on:
            check_routers(load_model_config(self._config.model), moe, section="sft.moe")

    def _load(self, files: Sequence[str], split: str) -> SftDataset:
        rows = read_sft_rows(files, self._config.data.cache_dir)
        data = self._settings.data
        dataset = SftDataset(rows.rows, self._tokenizer, data, split=split, sources=rows.sources)
        self._report_data(dataset, split)
        _check_media_tokens(dataset, self._config.model)
        if self._settings.distillation.is_on and split == "train":
            self._say(f"a teacher's {checked_top_k(dataset)} most likely tokens in each place")
        return dataset

    def _make_sampler(self) -> PromptSampler:
        """Order of the rows; with weights or shares of sources, the rows that each epoch visits."""
        settings, seed = self._settings, self._config.trainer.seed
        sources, data = self._examples.sources, settings.data
        weights = weights_of_sources(sources, data.source_weights, data.source_shares, section="sft.data")
        if not weights:
            return super()._make_sampler()
        chosen, num_rounds = weighted_epochs(sources, weights, settings.num_epochs, seed)
        rows = range(len(self._examples))
        return PromptSampler(rows, settings.examples_per_update, seed, num_epochs=num_rounds, chosen=chosen)

    def _role(self, learning: TrainingInit) -> RoleSpec[SupervisedWorker]:
        settings = self._settings
        return role(
            SupervisedWorker,
            self._config.model,
            settings.engine,
            settings.optim,
            learning,
            settings.distillation,
            settings.moe,
        )

    def _learn(self, places: Sequence[int], stages: Stages) -> tuple[DataProto, Update, Mapping[str, float]]:
        examples = [self._examples[index] for index in places]
        batch = make_sft_batch(examples, with_teacher=self._settings.distillation.is_on)
        with stages.stage("update"):
            update = merged_update(as_list(self._worker.call.update(batch, sft_totals(batch))))
        return batch, update, {}

    def _validate(self, dataset: SftDataset, step: int) -> dict[str, float]:
        """The mean loss per trained token of held-out rows, with its record."""
        size = self._settings.examples_per_update
        total, count = 0.0, 0
        for start in range(0, len(dataset), size):
            indices = range(start, min(start + size, len(dataset)))
            batch = make_sft_batch([dataset[index] for index in indices])
            log_probs = columns.flat(self._worker.call.compute_log_prob(batch).tensors()["log_probs"])
            trained = log_probs[columns.flat(batch.tensors()["loss_mask"])]
            total -= float(trained.sum())
            count += len(trained)
        loss = total / count
        self._run.events.append("validation", step, loss=loss)
        self._validated = step, loss
        if self._is_reached(step):
            self._say(
                f"step {step} is the last one: its validation loss of {loss:.4g} reaches "
                f"sft.target_loss={self._settings.target_loss:g}"
            )
        return {VALIDATION_LOSS: loss}

    def _is_reached(self, step: int) -> bool:
        """True if the loss of the validation after this step is small enough."""
        target, (validated, loss) = self._settings.target_loss, self._validated
        return target is not None and 0 < step == validated and loss <= target


def _check_media_tokens(dataset: SftDataset, model: ModelConfig) -> None:
    """Refuse tokens that stand for images without the images: recorded samples do not hold any.

    Raises:
        ValueError: with the row.
    """
    shape = load_model_config(model)
    if not takes_media(shape):
        return
    stand_for_media = set(media_token_ids(shape).values())
    for number in range(len(dataset)):
        example = dataset[number]
        if not example.media and not stand_for_media.isdisjoint(example.token_ids):
            raise ValueError(
                f"{dataset.split} row {example.row} has tokens that stand for images, but no images: recorded samples "
                f"do not hold them; use rows with messages and images"
            )


def checked_top_k(dataset: SftDataset) -> int:
    """Number of the teacher's tokens at each position.

    Raises:
        ValueError: there are none, or rows differ.
    """
    if not dataset.top_k:
        raise ValueError(
            f"sft.distillation.coef is set, but the rows have no columns {' and '.join(TEACHER)}: `strop generate "
            f"--top-logprobs` writes them, or set sft.distillation.coef=0"
        )
    return dataset.top_k


def make_sft_batch(examples: Sequence[SftExample], *, with_teacher: bool = False) -> DataProto:
    """One optimizer batch: each conversation as prompt (up to the first trained token) and response.

    Columns prompts [B, P~], responses and loss_mask [B, R~], true on trained tokens; media, where there are images;
    with a teacher, teacher_ids (int32) and teacher_logprobs [B, R~, K].
    """
    prompts, responses, masks = [], [], []
    top: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for example in examples:
        cut = example.loss_mask.index(True)
        if cut == 0:
            raise ValueError(
                f"sft row {example.row} is trained from its first token, which nothing predicts; the chat template "
                f"should begin with a token of its own or a user message"
            )
        prompts.append(torch.tensor(example.token_ids[:cut]))
        responses.append(torch.tensor(example.token_ids[cut:]))
        masks.append(torch.tensor(example.loss_mask[cut:]))
        if with_teacher:
            assert example.teacher is not None, "the data set was checked for it"
            first = cut - example.teacher.start
            top[0].append(torch.from_numpy(example.teacher.ids[first:]))
            top[1].append(torch.from_numpy(example.teacher.log_probs[first:]))
    media = [example.media for example in examples]
    return DataProto.from_dict(
        {
            "prompts": columns.jagged(prompts),
            "responses": columns.jagged(responses),
            "loss_mask": columns.jagged(masks),
            **(
                {name: columns.jagged(rows) for name, rows in zip(TEACHER, top, strict=True)}
                if top[0]
                else {}
            ),
        },
        non_tensors={"media": media} if any(media) else {},
        meta_info={"temperature": 1.0},
    )


def sft_totals(batch: DataProto) -> BatchTotals:
    """Denominators of the loss of an optimizer batch."""
    return batch_totals(*flat_mask(batch.tensors()))


def fine_tune(
    config: Config,
    run: RunFolder,
    *,
    checkpoint: Checkpoint | None = None,
    say: Reporter,
    stop: StopRequest | None = None,
) -> SftResult:
    """Run a fine-tuning to its end; arguments as those of `strop.trainer.train.train`."""
    stop = stop or SignalRequest()
    with environment_of(config.resources), stop.listening():
        return SftTrainer(config, run, checkpoint=checkpoint, say=say, stop=stop).fit()
