"""Vision-language models sharded over two gloo ranks: the numbers of one process, also where a rank sees no image."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from references.rank_processes import Ranks, run_ranks
from references.tiny_tiles import ONE_AXIS, save_tiny_tiles
from references.tiny_vision import BLUE, GREEN, RED, picture, png, save_tiny_vision
from references.token_passes import log_probs_of, of_log_probs
from strop.engines import gradients
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.multimodal.families import load_media_processor
from strop.engines.packing import make_rows
from strop.engines.parallel.ranks import Parallel
from strop.engines.training import TrainEngine
from strop.protocol import DataProto
from strop.protocol.trajectory import Media

IMAGE_ID = 105
# eps is large, so that an update is a smooth function of the gradient also where that is near 0.
OPTIM = OptimizerConfig(lr=0.02, eps=1e-3, weight_decay=0.1, max_grad_norm=3.0)


def rows(which: slice) -> DataProto:
    """Two samples of a prompt with an image, one of text, one with another image, one of text."""
    wide = Media(
        kind="image", parts=(png(picture(24, 17, RED, BLUE)),), size=(24, 17), grid=(1, 4, 6), start=1, num_tokens=6,
        key="wide",
    )  # fmt: skip
    green = Media(
        kind="image", parts=(png(picture(16, 16, GREEN)),), size=(16, 16), grid=(1, 4, 4), start=2, num_tokens=4,
        key="green",
    )  # fmt: skip
    first, second = [4, *[IMAGE_ID] * 6, 21], [4, 20, *[IMAGE_ID] * 4]
    prompts = [first, first, [4, 9], second, [4, 30, 31]][which]
    responses = [[40, 41, 42], [43], [44, 45], [46, 47], [48, 49, 50]][which]
    media: list[tuple[Media, ...]] = [(wide,), (wide,), (), (green,), ()]
    return make_rows([torch.tensor(p) for p in prompts], [torch.tensor(r) for r in responses], media[which])


def rows_of_tiles(folder: str, which: slice) -> DataProto:
    """The same for a model whose images have positions of text."""
    processor = load_media_processor(folder)
    assert processor is not None
    ids: dict[str, list[int]] = {}
    media: dict[str, tuple[Media, ...]] = {"": ()}
    for key, image in {"wide": picture(40, 17, RED, BLUE), "green": picture(16, 16, GREEN)}.items():
        grid = processor.grid("image", image.size)
        ids[key] = list(processor.image_ids(grid))
        one = Media(
            kind="image", parts=(png(image),), size=image.size, grid=grid, start=1, num_tokens=len(ids[key]), key=key,
        )  # fmt: skip
        media[key] = (one,)
    first, second = [4, *ids["wide"], 21], [4, *ids["green"], 20]
    prompts = [first, first, [4, 9], second, [4, 30, 31]][which]
    responses = [[40, 41, 42], [43], [44, 45], [46, 47], [48, 49, 50]][which]
    shown = [media[key] for key in ("wide", "wide", "", "green", "")][which]
    return make_rows([torch.tensor(p) for p in prompts], [torch.tensor(r) for r in responses], shown)


def trained(folder: str, which: slice, parallel: Parallel | None, checkpointing: bool) -> dict[str, Any]:
    """Weights after two steps, and the log-probs of some rows before them."""
    dtype: Any = "float32" if folder.endswith("kimi_k25") else "float64"  # its experts take no float64
    config = ModelConfig(path=folder, dtype=dtype, gradient_checkpointing=checkpointing)
    model = load_model(config, device="cpu", parallel=parallel)
    rows_here = rows if hasattr(model.module.base_model, "get_rope_index") else partial(rows_of_tiles, folder)
    settings = EngineConfig(max_tokens_per_device=40 if rows_here is not rows else 16)
    engine = TrainEngine(model, settings, OPTIM, total_steps=None, parallel=parallel)
    before, _ = log_probs_of(engine, rows_here(which), temperature=1.0)
    for _ in range(2):
        engine.accumulate(
            rows_here(which), of_log_probs(lambda log_probs, _, __: -log_probs.sum() / 10, temperature=1.0)
        )
        engine.step()
    weights = {name: gradients.full(p.detach()).clone() for name, p in model.named_parameters()}
    return {"before": before, "weights": weights}


def on_ranks(ranks: Ranks, folder: str, checkpointing: bool) -> dict[str, Any]:
    return trained(folder, slice(0, 4) if ranks.rank == 0 else slice(4, 5), ranks.join(), checkpointing)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [
        ("qwen2_vl", True),
        ("qwen3_vl", False),
        ("gemma3", True),
        ("internvl", False),
        ("llama4", True),
        ("kimi_k25", False),
    ],
)
def test_two_ranks_give_the_weights_of_one(kind: str, checkpointing: bool, tmp_path: Path) -> None:
    folder = str((save_tiny_tiles if kind in ONE_AXIS else save_tiny_vision)(kind, tmp_path / kind))
    alone = trained(folder, slice(0, 5), None, False)
    ranks = run_ranks(on_ranks, 2, folder, checkpointing)
    torch.testing.assert_close(
        torch.cat([one["before"] for one in ranks]), alone["before"], rtol=0, atol=1e-6
    )
    for one in ranks:
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(one["weights"][name], weight, rtol=0, atol=2e-5, msg=name)
