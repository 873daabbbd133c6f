"""Fine-tuning on conversations with images: tokens, loss and gradient are those of transformers' own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from test_fine_tuning import resume, tune
from trainer.tiny_runs import chain_of
from transformers import AutoModelForImageTextToText

from references.tiny_tiles import EVERY_RUN, ONE_AXIS, plain_arguments, save_tiny_tiles
from references.tiny_vision import BLUE, GREEN, KINDS, RED, picture, png, save_tiny_vision
from strop.config import load_config
from strop.data.sft.config import SftDataConfig
from strop.data.sft.dataset import SftDataset
from strop.data.sft.stored_conversation import SftExample
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.multimodal.families import load_media_processor
from strop.engines.tokenizer import load_tokenizer
from strop.trainer.config import Config
from strop.trainer.sft.trainer import SftTrainer, make_sft_batch, sft_totals
from strop.trainer.timing import Stages
from strop.utils.metrics import metric_values
from strop.workers.models import TrainingInit
from strop.workers.sft import SupervisedWorker

WIDE, HIGH = png(picture(24, 17, RED, BLUE)), png(picture(17, 33, GREEN, RED))


def said(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]


ROWS = [
    {"messages": said("a<image>b", "red"), "images": [WIDE]},
    {"messages": said("<image>x", "green", "and<image>", "blue"), "images": [HIGH, WIDE]},
    {"messages": said("plain", "text")},
]
"""One image, two in different turns, none."""


def dataset(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> SftDataset:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    return SftDataset(rows, tokenizer, SftDataConfig(**settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers.utils.logging.disable_progress_bar()
    return save_tiny_vision("qwen2_vl", tmp_path_factory.mktemp("vision") / "model")


def loss_of_transformers(path: Path, examples: list[SftExample]) -> tuple[float, float]:
    """Mean over trained tokens of -log p, each conversation alone, and the norm of its gradient.

    As in generation, tokens that stand for images and videos are never what comes next.
    """
    processor = load_media_processor(path)
    assert processor is not None
    module: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    terms = []
    for one in examples:
        ids = torch.tensor([one.token_ids])
        arguments = plain_arguments(module, path, ids, one.media)
        logits = module(input_ids=ids, attention_mask=torch.ones_like(ids), **arguments).logits[0]
        logits = logits.index_fill(1, torch.tensor(sorted(processor.token_ids.values())), -torch.inf)
        for position, is_trained in enumerate(one.loss_mask):
            if is_trained:
                terms.append(-torch.log_softmax(logits[position - 1], dim=-1)[one.token_ids[position]])
    loss = torch.stack(terms).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    return loss.item(), norm.item()


@pytest.mark.parametrize("kind", [*KINDS, *EVERY_RUN])
@pytest.mark.parametrize("budget", [80, 400])
def test_loss_and_gradient_are_those_of_transformers_alone_and_packed(
    kind: str, budget: int, tmp_path: Path
) -> None:
    path = (save_tiny_tiles if kind in ONE_AXIS else save_tiny_vision)(kind, tmp_path / "model")
    examples = list(dataset(path, ROWS))
    loss, norm = loss_of_transformers(path, examples)
    worker = SupervisedWorker(
        ModelConfig(path=str(path), dtype="float32"), EngineConfig(max_tokens_per_device=budget),
        OptimizerConfig(lr=1e-3, max_grad_norm=1e9), TrainingInit(device="cpu", num_updates=1),
    )  # fmt: skip
    batch = make_sft_batch(examples)
    numbers = metric_values(worker.update(batch, sft_totals(batch)).metrics)
    assert numbers["train/loss"] == pytest.approx(loss, rel=2e-5)
    assert numbers["train/grad_norm"] == pytest.approx(norm, rel=2e-4)


def test_tokens_of_images_are_placed_and_never_trained(folder: Path) -> None:
    processor = load_media_processor(folder)
    assert processor is not None
    image = processor.token_ids["image"]
    one, two, plain = dataset(folder, ROWS)
    assert [len(example.media) for example in (one, two, plain)] == [1, 2, 0]
    for example in (one, two):
        places = {place for media in example.media for place in range(*media.span)}
        assert places == {place for place, token in enumerate(example.token_ids) if token == image}
        assert not any(example.loss_mask[place] for place in places)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    trained = [token for token, mask in zip(two.token_ids, two.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == "green<|im_end|>blue<|im_end|>"


def cut_at(folder: Path, limit: int, side: str) -> SftExample | None:
    """What is kept of the second row, with one beside it that fits; None where nothing is."""
    rows = [ROWS[1], {"messages": said("p", "x")}]
    kept = list(dataset(folder, rows, max_tokens=limit, truncation=side))
    return kept[0] if len(kept) == 2 else None


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_cut_keeps_images_whole(folder: Path, side: str) -> None:
    """At every limit: tokens are a beginning or an end of the whole, with the images that are in it."""
    (whole,) = dataset(folder, ROWS[1:2])
    seen = set()
    for limit in range(len(whole.token_ids) - 1, 4, -1):
        found = cut_at(folder, limit, side)
        if found is None:
            continue
        cut = found
        size = len(cut.token_ids)
        assert size <= limit
        offset = 0 if side == "right" else len(whole.token_ids) - size
        assert cut.token_ids == whole.token_ids[offset : offset + size]
        kept = [one for one in whole.media if offset <= one.start and one.span[1] <= offset + size]
        assert [(one.start + offset, one.key) for one in cut.media] == [(one.start, one.key) for one in kept]
        assert cut.loss_mask[1:] == whole.loss_mask[offset + 1 : offset + size]
        assert not cut.loss_mask[0]
        seen.add(len(cut.media))
    assert len(seen) > 1


def test_what_is_not_taken_is_said_before_a_model_is_loaded(folder: Path, tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="train row 0 has videos, which fine-tuning does not take"):
        dataset(folder, [{"messages": said("<video>?", "x"), "videos": [[WIDE, WIDE]]}])
    with pytest.raises(ValueError, match="takes text alone"):
        dataset(tiny_model, ROWS[:1])
    with pytest.raises(ValueError, match="1 placeholders <image> in its messages, but 2 images"):
        dataset(folder, [{"messages": said("<image>", "x"), "images": [WIDE, WIDE]}])


def settings(folder: Path, model: Path, *more: str) -> Config:
    rows = [
        {**ROWS[number % 3], "messages": said("a<image>b", "red" if number % 2 else "blue")}
        for number in range(8)
    ]
    rows = [
        {"messages": row["messages"], "pictures": [{"bytes": (WIDE, HIGH)[n % 2], "path": None}]}
        for n, row in enumerate(rows)
    ]
    file = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return load_config(Config, overrides=[
        f"model.path='{model}'", f"sft.data.train_files=['{file}']", f"sft.data.val_files=['{file}']",
        "sft.data.image_key=pictures", "sft.examples_per_update=2", "sft.num_epochs=4", "sft.optim.lr=1e-2",
        "trainer.trackers=[jsonl]", "run.save_every=3", "resources.num_threads=1", *more,
    ])  # fmt: skip


@pytest.mark.slow
def test_a_run_learns_which_image_has_which_answer_and_its_resume_is_the_same(
    folder: Path, tmp_path: Path
) -> None:
    config = settings(tmp_path, folder)
    whole, words = tune(tmp_path / "whole", config)
    assert whole.steps == 16
    assert whole.val_loss is not None
    assert whole.val_loss < 0.5, words
    with pytest.MonkeyPatch.context() as patch:
        step = SftTrainer._step

        def stopped(self: SftTrainer, number: int, stages: Stages) -> dict[str, float]:
            if number == 8:
                raise InterruptedError
            return step(self, number, stages)

        patch.setattr(SftTrainer, "_step", stopped)
        with pytest.raises(InterruptedError):
            tune(tmp_path / "cut", config)
    resume(tmp_path / "cut")
    assert [one.chain for one in chain_of(tmp_path / "cut")] == [
        one.chain for one in chain_of(tmp_path / "whole")
    ]
    with pytest.raises(ValueError, match="conversations have images, which cannot be divided"):
        tune(
            tmp_path / "sp",
            settings(
                tmp_path,
                folder,
                "sft.engine.sequence_parallel=2",
                "resources.ranks=2",
                "resources.runtime=ray",
            ),
        )
