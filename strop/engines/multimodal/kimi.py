"""Images of Kimi K2.5: a grid of patches, padded to whole tokens, with positions of text.

transformers has this in an image processor that needs torchvision. Here are its formulas, on the settings of the same
file, with the 8-bit resizing of torch that torchvision calls. A picture is shrunk where it has too many patches, and
never enlarged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.engines.multimodal.image_reader import upright_pictures
from strop.engines.multimodal.patch_grids import GridVision
from strop.engines.multimodal.pixels import MediaProcessor, changed, image_settings
from strop.engines.multimodal.vl_model import Vision
from strop.protocol.trajectory import Media

_DEFAULTS: Mapping[str, Any] = {
    "size": {"max_height": 512, "max_width": 512},
    "max_patches": 16384,
    "patch_size": 14,
    "merge_size": 2,
    "rescale_factor": 1 / 255,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
}
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}
"""Settings that have one value here: bicubic, and as the model was trained."""


class KimiProcessor(MediaProcessor):
    """Sizes into patches and tokens, files into patches."""

    def __init__(self, model_config: Any, *, folder: Path) -> None:
        """Args:
        model_config: the model's configuration.
        folder: where its settings are.

        Raises:
            ValueError: these cannot be read, or one is not known here.
        """
        super().__init__(folder)
        complaint = f"the image processor of {str(folder)!r} cannot be used"
        written = image_settings(folder) or {}
        for name, value in _FIXED.items():
            if written.get(name, value) != value:
                raise ValueError(f"{complaint}: {name} is {written[name]}, and only {value} is known here")
        settings = {
            **_DEFAULTS,
            **{name: written[name] for name in _DEFAULTS if written.get(name) is not None},
        }
        self._patch, self._merge = int(settings["patch_size"]), int(settings["merge_size"])
        self._most, self._most_per_side = int(settings["max_patches"]), int(settings["size"]["max_height"])
        factor = float(settings["rescale_factor"])
        self._mean, self._std = (
            torch.tensor(settings[name])[:, None, None] * (1.0 / factor)
            for name in ("image_mean", "image_std")
        )
        self.token_ids = self.placeholder_ids = {"image": int(model_config.image_token_id)}

    def grid(self, kind: str, size: tuple[int, int], num_frames: int = 1) -> tuple[int, int, int]:
        """1, and patches along height and width, in whole tokens."""
        side = self._patch * self._merge
        high, wide = (-(-length // side) * self._merge for length in self._resized(size))
        return 1, high, wide

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens that stand for this many patches."""
        return math.prod(grid) // self._merge**2

    def _resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of a picture of this width and height once it is no larger than may be."""
        wide, high = size
        patches = max(1.0, high // self._patch) * max(1.0, wide // self._patch)
        longest = self._most_per_side * self._patch
        scale = min(1.0, math.sqrt(self._most / patches), longest / high, longest / wide)
        return min(max(1, int(high * scale)), longest), min(max(1, int(wide * scale)), longest)

    def _make(self, media: Media) -> Tensor:
        """Patches [h w, C, patch_size, patch_size], row by row."""
        image = upright_pictures(media.parts[0], every=False)[0]
        if (grid := self.grid("image", image.size)) != media.grid:
            raise changed(media, grid, media.grid, "patches (time, height, width)")
        picture = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].contiguous()  # [1, C, H, W]
        size = self._resized(image.size)
        if tuple(picture.shape[-2:]) != size:
            picture = F.interpolate(picture, size, mode="bicubic", antialias=True, align_corners=False)
        _, rows, columns = media.grid
        padding = (0, columns * self._patch - size[1], 0, rows * self._patch - size[0])
        values = F.pad(picture, padding)[0].to(torch.float32).sub(self._mean).div_(self._std)
        cut = values.view(-1, rows, self._patch, columns, self._patch).permute(1, 3, 0, 2, 4)
        return cut.flatten(0, 1).contiguous()


class KimiVision(GridVision):
    """The vision side of a Kimi K2.5 model."""

    def __init__(self, module: Any, processor: MediaProcessor | None) -> None:
        """Find the parts of the model."""
        base, settings = module.base_model, module.config.vision_config
        tower = nn.ModuleList([base.vision_tower, base.mm_projector])
        token_ids = {"image": int(module.config.image_token_id)}
        Vision.__init__(self, module, processor, token_ids, tower)
        self.merge_size = int(settings.merge_kernel_size[0])
        self.patch_shape = (3, int(settings.patch_size), int(settings.patch_size))

    positions = Vision.positions
    trial_positions = Vision.trial_positions
    own_arguments = Vision.own_arguments
    """Tokens of images count as those of text do, and the model finds them by their token."""
