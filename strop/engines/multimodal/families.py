"""Families of models that read images: as grids of patches (patch_grids.py), or as tiles (tiling.py), declared here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from strop.engines.model_folder import reading
from strop.engines.multimodal.kimi import KimiProcessor, KimiVision
from strop.engines.multimodal.llama4_canvas import load_canvas_processor
from strop.engines.multimodal.patch_grids import GridProcessor, GridVision, grid_token_ids
from strop.engines.multimodal.pixels import SETTINGS, MediaProcessor, image_settings, load_image_processor
from strop.engines.multimodal.tiling import TileFamily, TileProcessor, TileVision
from strop.engines.multimodal.vl_model import Reader, Vision


def _pooled(module: Any, pixels: Tensor) -> Tensor:
    """Image features of tiles, where the model's base computes tower and projector in one call."""
    features: Tensor = module.base_model.get_image_features(pixels, return_dict=True).pooler_output
    return features


def _llama4_features(module: Any, pixels: Tensor) -> Tensor:
    tower = module.vision_model
    seen = tower(pixels.to(tower.dtype), return_dict=True).last_hidden_state
    features: Tensor = module.multi_modal_projector(seen.flatten(0, 1))
    return features


def _llama4_hidden(
    module: Any, *, input_ids: Tensor, pixel_values: Tensor | None = None, **others: Any
) -> Any:
    """Output of the decoder, with images in their places: the class that has both gives logits alone."""
    embedded = module.get_input_embeddings()(input_ids)
    if pixel_values is not None:
        features = _llama4_features(module, pixel_values).to(embedded.dtype)
        places = module.get_placeholder_mask(input_ids, inputs_embeds=embedded, image_features=features)
        embedded = embedded.masked_scatter(places, features)
    return module.language_model.model(inputs_embeds=embedded, **others)


def _internvl_tiles(processor: Any, size: tuple[int, int]) -> tuple[int, int]:
    """InternVL's processor says how many there are, the whole image among them, and the text not where they lie."""
    wide, high = size
    count = int(processor.get_number_of_image_patches(high, wide, {"crop_to_patches": True}))
    return 1, max(1, count - 1)


def _llama4_per_tile(config: Any) -> int:
    vision = config.vision_config
    return int((vision.image_size // vision.patch_size) ** 2 * vision.pixel_shuffle_ratio**2)


TILED: Mapping[str, TileFamily] = {
    "gemma3": TileFamily(
        tokens_per_tile=lambda config: int(config.mm_tokens_per_image),
        tiles=lambda processor, size: (1, 1),
        placeholder="<start_of_image>",
        opens=("<start_of_image>",),
        closes=("<end_of_image>",),
        around="\n\n",
        sees_ahead=True,
        features=_pooled,
        options={"do_pan_and_scan": False, "do_convert_rgb": True},
    ),
    "internvl": TileFamily(
        tokens_per_tile=lambda config: int(config.image_seq_length),
        tiles=_internvl_tiles,
        opens=("<img>",),
        closes=("</img>",),
        features=_pooled,
        options={"crop_to_patches": True},
    ),
    "llama4": TileFamily(
        tokens_per_tile=_llama4_per_tile,
        tiles=lambda processor, size: processor.tiles(size),
        placeholder="<|image|>",
        opens=("<|image_start|>",),
        closes=("<|image_end|>",),
        between=("<|tile_x_separator|>",),
        ends_row=("<|tile_y_separator|>",),
        before_whole=("<|image|>",),
        tower=("vision_model", "multi_modal_projector"),
        features=_llama4_features,
        hidden=_llama4_hidden,
        load=load_canvas_processor,
        options={},
    ),
}
"""Model type -> how its models read images."""
KIMI = "kimi_k25"


def takes_media(config: Any) -> bool:
    """True for a model that reads images in a way that is supported here."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return False
    has_grid = getattr(vision, "spatial_merge_size", None) is not None
    return config.model_type in {*TILED, KIMI} or (has_grid and bool(grid_token_ids(config)))


def media_token_ids(config: Any) -> dict[str, int]:
    """Kind of media -> id of its token, for the kinds that a model has."""
    token_ids = grid_token_ids(config)
    return {"image": token_ids["image"]} if config.model_type in {*TILED, KIMI} else token_ids


def written_template(config: Any, template: str) -> str:
    """A chat template with the text that the processor of a family writes around images, before it is encoded."""
    family = TILED.get(config.model_type)
    if family is None or not family.around:
        return template
    around = family.around.replace("\n", "\\n")  # as a template writes it in a piece of text
    return template.replace(family.placeholder, f"{around}{family.placeholder}{around}")


def vision_of(module: Any, processor: MediaProcessor | None) -> Vision | None:
    """The vision side of a loaded model; None where it has none, as the classifiers of transformers."""
    family = TILED.get(module.config.model_type)
    if family is not None and module.get_output_embeddings() is not None:
        return TileVision(family, module, processor)
    if module.config.model_type == KIMI:
        return KimiVision(module, processor)
    return GridVision(module, processor) if hasattr(module.base_model, "get_rope_index") else None


def reader_of(config: Any, processor: MediaProcessor | None) -> Reader | None:
    """Reader of media as grids of patches for the models of a configuration; None for other families."""
    if not takes_media(config) or config.model_type in {*TILED, KIMI}:
        return None
    tells_seconds = hasattr(config.vision_config, "tokens_per_second")  # Qwen2.5-VL
    return Reader(processor, grid_token_ids(config), tells_seconds=tells_seconds)


def load_media_processor(folder: str | Path) -> MediaProcessor | None:
    """The processor of a model folder; None for a model that takes text alone.

    One per folder and process, so that all who need the pixels of a picture share them.

    Raises:
        ValueError: the folder has an image processor that cannot be used here.
    """
    path = Path(folder)
    changed = tuple((path / name).stat().st_mtime_ns for name in SETTINGS if (path / name).is_file())
    if not (path / "config.json").is_file() or image_settings(path) is None:
        return None
    return _load(str(path.resolve()), changed)


@functools.lru_cache(maxsize=4)
def _load(folder: str, _changed: tuple[int, ...]) -> MediaProcessor | None:
    with reading(folder, f"model folder {folder!r} cannot be used"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if not takes_media(config):
        return None
    path = Path(folder)
    family = TILED.get(config.model_type)
    if family is not None:
        return TileProcessor(family, config, folder=path)
    if config.model_type == KIMI:
        return KimiProcessor(config, folder=path)
    return GridProcessor(load_image_processor(path), config, folder=path)
