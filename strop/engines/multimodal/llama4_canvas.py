"""Images of Llama 4: on a canvas of tiles, without distortion.

transformers has this in an image processor that needs torchvision. Here are its formulas, on the settings of the same
file, with the 8-bit resizing of torch that torchvision calls.

    canvases of at most 4 tiles    1x1  1x2  2x1  1x3  3x1  1x4  2x2  4x1
    the one taken                  enlarges the picture least; where none does, shrinks it least; of equals the smallest
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engines.multimodal.pixels import image_settings

_RESAMPLING = {2: "bilinear", 3: "bicubic"}
"""Numbers of Pillow's filters -> names of torch."""
_DEFAULTS: Mapping[str, Any] = {
    "size": {"height": 336, "width": 336},
    "max_patches": 16,
    "resize_to_max_canvas": False,
    "resample": 2,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
}


class CanvasProcessor:
    """Pictures into tiles, as Llama4ImageProcessor makes them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Args:
        settings: of the model folder; what it does not say is as transformers has it.

        Raises:
            ValueError: a setting is not known here.
        """
        written = {name: settings[name] for name in _DEFAULTS if settings.get(name) is not None}
        self._settings = {**_DEFAULTS, **written}
        self.size: Mapping[str, int] = self._settings["size"]
        self.do_resize: bool = self._settings["do_resize"]
        self._side = int(self.size["height"])
        if self._settings["resample"] not in _RESAMPLING:
            raise ValueError(
                f"resample is {self._settings['resample']} for images; 2 (bilinear) and 3 (bicubic) are known"
            )
        if not (self._settings["do_rescale"] and self._settings["do_normalize"]):
            raise ValueError("do_rescale and do_normalize must be true, as the model was trained")

    def tiles(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of tiles of the canvas for a picture of this width and height."""
        wide, high = size
        canvases = torch.tensor(_canvases(int(self._settings["max_patches"])))
        sides = canvases * self._side
        scales = torch.minimum(sides[:, 0] / high, sides[:, 1] / wide)
        larger = scales[scales >= 1]
        if not len(larger):
            best = scales.max()
        else:
            best = larger.max() if self._settings["resize_to_max_canvas"] else larger.min()
        equal = canvases[scales == best]
        rows, columns = equal[equal.prod(dim=1).argmin()].tolist()
        return rows, columns

    def __call__(self, *, images: Sequence[Any], return_tensors: str) -> dict[str, Tensor]:
        """pixel_values [tiles, C, H, W] float32: row by row, and the whole picture where there are several."""
        assert return_tensors == "pt", "nothing else is asked for"
        return {"pixel_values": torch.cat([self._cut(image) for image in images]).to(torch.float32)}

    def _cut(self, image: Any) -> Tensor:
        picture = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].contiguous()  # [1, C, H, W]
        rows, columns = self.tiles(image.size)
        canvas = (rows * self._side, columns * self._side)
        resized = self._resized(picture, self._fitted(image.size, canvas))
        padding = (0, canvas[1] - resized.shape[-1], 0, canvas[0] - resized.shape[-2])
        cut = self._scaled(F.pad(resized, padding))[0]
        cut = cut.view(-1, rows, self._side, columns, self._side).permute(1, 3, 0, 2, 4).flatten(0, 1)
        if rows * columns == 1:
            return cut
        return torch.cat([cut, self._scaled(self._resized(picture, (self._side, self._side)))])

    def _fitted(self, size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the picture on the canvas; it is enlarged no further than to a tile."""
        wide, high = size
        if not self._settings["resize_to_max_canvas"]:
            canvas = (min(max(high, self._side), canvas[0]), min(max(wide, self._side), canvas[1]))
        by_width, by_height = canvas[1] / wide, canvas[0] / high
        if by_width < by_height:
            fitted = min(math.floor(high * by_width), canvas[0]), canvas[1]
        else:
            fitted = canvas[0], min(math.floor(wide * by_height), canvas[1])
        return max(fitted[0], 1), max(fitted[1], 1)

    def _resized(self, picture: Tensor, size: tuple[int, int]) -> Tensor:
        if tuple(picture.shape[-2:]) == size:
            return picture
        mode = _RESAMPLING[self._settings["resample"]]
        return F.interpolate(picture, size, mode=mode, antialias=True, align_corners=False)

    def _scaled(self, picture: Tensor) -> Tensor:
        """Rescaled and normalized in bfloat16, as in the original implementation."""
        values = picture.to(torch.bfloat16) * float(self._settings["rescale_factor"])
        mean, std = (
            torch.tensor(self._settings[name], dtype=torch.bfloat16)[:, None, None]
            for name in ("image_mean", "image_std")
        )
        return values.sub(mean).div_(std)


def load_canvas_processor(folder: Path) -> CanvasProcessor:
    """The settings of a model folder.

    Raises:
        ValueError: they cannot be read, or one is not known here.
    """
    try:
        return CanvasProcessor(image_settings(folder) or {})
    except ValueError as error:
        raise ValueError(f"the image processor of {str(folder)!r} cannot be used: {error}") from error


def _canvases(max_tiles: int) -> list[tuple[int, int]]:
    """Rows and columns of every canvas of at most so many tiles."""
    return [
        (rows, count // rows)
        for count in range(max_tiles, 0, -1)
        for rows in range(1, count + 1)
        if count % rows == 0
    ]
