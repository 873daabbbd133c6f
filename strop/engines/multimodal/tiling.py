"""Models that read a picture as square tiles of one size, each with as many tokens: Gemma 3, InternVL, Llama 4.

A large image is several tiles, and behind them the whole of it as one more. What differs from family to family is a
declaration (`TileFamily`): how many tiles, which tokens stand around them, and where the model keeps its tower.
Positions are those of text.

    InternVL, 2 x 1 tiles    <img> t t t t  t t t t  t t t t </img>
                                   upper    lower    whole image

A declaration is shown to be right when a model is loaded (probe.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from strop.engines.model_folder import reading
from strop.engines.multimodal.image_reader import upright_pictures
from strop.engines.multimodal.pixels import MediaProcessor, changed, load_image_processor
from strop.engines.multimodal.vl_model import Trial, Vision
from strop.engines.segments import Span
from strop.protocol.trajectory import Media


@dataclass(frozen=True, kw_only=True)
class TileFamily:
    """Image format of the models of one type. Tokens are named by their text."""

    tokens_per_tile: Callable[[Any], int]
    """Of a configuration."""
    tiles: Callable[[Any, tuple[int, int]], tuple[int, int]]
    """Of an image processor, and the width and height of an image: rows and columns of tiles."""
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    """Tokens before and behind all that stands for an image."""
    placeholder: str = ""
    """Text that the chat template writes for an image; empty: the token that stands for a part of it."""
    between: tuple[str, ...] = ()
    """Between two tiles of a row."""
    ends_row: tuple[str, ...] = ()
    before_whole: tuple[str, ...] = ()
    """Before the tile that shows the whole image."""
    around: str = ""
    """Text on both sides of an image that the model's own processor writes, whatever the template has there."""
    sees_ahead: bool = False
    """Tokens of one image see each other whatever their order."""
    tower: tuple[str, ...] = ("model.vision_tower", "model.multi_modal_projector")
    """The parts of the model that read images, up to what the language part takes."""
    features: Callable[[Any, Tensor], Tensor]
    """Features by these parts of tiles [n, C, H, W]."""
    hidden: Callable[..., Any] | None = None
    """Called with the model and then as its base would be, where it has no base that takes images."""
    load: Callable[[Path], Any] = load_image_processor
    """The image processor of a model folder."""
    options: Mapping[str, Any]
    """Arguments that transformers' processor of the family gives the image processor, whatever its file says."""

    def num_tiles(self, grid: tuple[int, int, int]) -> int:
        """Tiles of an image of so many rows and columns, and the whole of it where these are several."""
        _, rows, columns = grid
        return 1 if rows * columns == 1 else rows * columns + 1


class TileProcessor(MediaProcessor):
    """Sizes into tiles and tokens, files into tiles."""

    def __init__(self, family: TileFamily, model_config: Any, *, folder: Path) -> None:
        """Args:
            family: of the model.
            model_config: the model's configuration.
            folder: where its settings and its tokenizer are.

        Raises:
            ValueError: the image processor cannot be loaded, or makes tiles of another size than the model takes.
        """
        super().__init__(folder)
        self._family = family
        self._processor = family.load(folder)
        self._per_tile = family.tokens_per_tile(model_config)
        self.token_ids = {"image": int(model_config.image_token_id)}
        self._side = tile_side(model_config)
        size = self._processor.size
        if {size["height"], size["width"]} != {self._side} or not self._processor.do_resize:
            raise ValueError(
                f"the image processor of {str(folder)!r} makes tiles of {size['width']}x{size['height']}, and the "
                f"model takes {self._side}x{self._side}: use the preprocessor_config.json that belongs to it"
            )

    @functools.cached_property
    def placeholder_ids(self) -> Mapping[str, int]:  # type: ignore[override]
        """Kind of media -> id of the token that a chat template writes in its place."""
        name = self._family.placeholder
        return {"image": self._id(name)} if name else self.token_ids

    def grid(self, kind: str, size: tuple[int, int], num_frames: int = 1) -> tuple[int, int, int]:
        """1, and rows and columns of tiles."""
        return (1, *self._family.tiles(self._processor, size))

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens that stand for parts of this many tiles."""
        return self._family.num_tiles(grid) * self._per_tile

    def image_ids(self, grid: tuple[int, int, int]) -> tuple[int, ...]:
        """All that stands for an image, from the token that opens it to the one that closes it."""
        family, (_, rows, columns) = self._family, grid
        tile: list[str | None] = [None] * self._per_tile
        row = [*tile, *itertools.chain.from_iterable([*family.between, *tile] for _ in range(columns - 1))]
        names: list[str | None] = list(family.opens)
        if rows * columns > 1:
            names += [*row, *family.ends_row] * rows
        names += [*family.before_whole, *tile, *family.closes]
        return tuple(self.token_ids["image"] if name is None else self._id(name) for name in names)

    def check_around(self, before: Sequence[int], behind: Sequence[int]) -> None:
        """Refuse an image without the text that belongs around it.

        Raises:
            ValueError: see above.
        """
        around = self._family.around
        near = len(around)  # tokens are at least a character
        sides = self._tokenizer.decode(list(before[-near:])), self._tokenizer.decode(list(behind[:near]))
        if near and not (sides[0].endswith(around) and sides[1].startswith(around)):
            raise ValueError(
                f"the chat template writes {sides[0]!r} and {sides[1]!r} around an image, and this model was trained "
                f"with {around!r} on both sides: write {self._family.placeholder} into the template as one piece of "
                f"text, and strop adds it"
            )

    def _make(self, media: Media) -> Tensor:
        """Tiles [n, C, H, W]."""
        pictures = upright_pictures(media.parts[0], every=False)
        inputs = self._processor(images=pictures, return_tensors="pt", **self._family.options)
        tiles: Tensor = inputs["pixel_values"].to(torch.float32).contiguous()
        if len(tiles) != (counted := self._family.num_tiles(media.grid)):
            raise changed(media, len(tiles), counted, "tiles")
        return tiles

    @functools.cached_property
    def _tokenizer(self) -> Any:
        with reading(
            self.folder, f"the tokens around images cannot be found: {str(self.folder)!r} has no tokenizer"
        ):
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)

    def _id(self, name: str) -> int:
        token_id = self._tokenizer.get_vocab().get(name)
        if token_id is None:
            raise ValueError(
                f"the tokenizer of {str(self.folder)!r} has no token {name!r}, which this model has around images"
            )
        return int(token_id)


class TileVision(Vision):
    """The vision side of a model of a `TileFamily`."""

    def __init__(self, family: TileFamily, module: Any, processor: MediaProcessor | None) -> None:
        """Find the parts of the model."""
        tower = nn.ModuleList(module.get_submodule(name) for name in family.tower)
        super().__init__(module, processor, {"image": int(module.config.image_token_id)}, tower)
        self._family = family
        self._per_tile = family.tokens_per_tile(module.config)
        if family.hidden is not None:
            self.hidden = functools.partial(family.hidden, module)

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens that stand for parts of this many tiles."""
        return self._family.num_tiles(grid) * self._per_tile

    def blocks(self, token_ids: Tensor) -> tuple[Span, ...]:
        """The tokens of each image, where they see each other."""
        if not self._family.sees_ahead:
            return ()
        is_image = (token_ids == self.token_ids["image"]).int()
        edges = torch.diff(is_image, prepend=is_image.new_zeros(1), append=is_image.new_zeros(1))
        starts, ends = torch.nonzero(edges > 0)[:, 0].tolist(), torch.nonzero(edges < 0)[:, 0].tolist()
        return tuple(zip(starts, ends, strict=True))

    def arguments_of(self, kind: str, chosen: Sequence[Media], pixels: Tensor) -> Mapping[str, Tensor]:
        """pixel_values [tiles, C, H, W]."""
        return {"pixel_values": pixels}

    def features_of_nothing(self, device: torch.device) -> Sequence[Tensor]:
        """Features of one tile of zeros."""
        return [self._family.features(self.module, torch.zeros(1, *self._shape, device=device))]

    def trials(self, device: torch.device) -> Sequence[Trial]:
        """An image of one tile, and one of two and the whole."""
        trials = []
        for number, count in enumerate((1, 3)):
            size = (count, *self._shape)
            shades = torch.linspace(-1.0, 1.0 + number, torch.Size(size).numel(), device=device).view(size)
            trial = Trial(num_tokens=count * self._per_tile, arguments={"pixel_values": shades})
            trials.append(trial)
        return trials

    def own_arguments(self, token_ids: Tensor) -> Mapping[str, Tensor]:
        """Mask of the tokens that stand for images, where the model asks for it."""
        if not self._family.sees_ahead:
            return {}
        return {"token_type_ids": (token_ids == self.token_ids["image"]).long()[None]}

    @property
    def _shape(self) -> tuple[int, int, int]:
        settings = self.module.config.vision_config
        side = tile_side(self.module.config)
        return int(settings.num_channels), side, side


def tile_side(model_config: Any) -> int:
    """Pixels along each side of a tile.

    Raises:
        ValueError: tiles are not square.
    """
    size = model_config.vision_config.image_size
    high, wide = size if isinstance(size, list | tuple) else (size, size)
    if high != wide:
        raise ValueError(f"the vision tower takes images of {high}x{wide}; only square ones are known here")
    return int(high)
