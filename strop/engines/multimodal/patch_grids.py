"""Models that read a picture as a grid of patches of its own shape: Qwen2-VL and those built like it.

The image processor of transformers that lies beside the model does the resizing, scaling and cutting; for videos see
video_settings.py. Positions count along time, height and width.

    text t0 t1 <image of 2 x 3 tokens> t2      positions, one column per token
    time       0 1  2 2 2 2 2 2        5
    height     0 1  2 2 2 3 3 3        5
    width      0 1  2 3 4 2 3 4        5       the response goes on with 6, 7, ... in all three rows

Source: Wang et al. 2024, arXiv:2409.12191, section 2.1 (M-RoPE).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.engines.multimodal.image_reader import upright_pictures
from strop.engines.multimodal.pixels import MediaProcessor, changed, film_key
from strop.engines.multimodal.video_reader import digest_of, read_frames
from strop.engines.multimodal.video_settings import VideoSettings, load_video_settings
from strop.engines.multimodal.vl_model import Trial, Vision
from strop.protocol.trajectory import Media

MAX_ASPECT = 200
"""Longest side over shortest side that is accepted, as in the reference of the Qwen models."""
_TAKES_VIDEOS = {"qwen2_vl": False, "qwen2_5_vl": False, "qwen3_vl": True, "qwen3_vl_moe": True}
"""Model type -> whether the times of a video's patches stand as text between them."""
_FRAMES_IN_BOUNDS = frozenset({"glm4v", "glm4v_moe", "glm46v"})
"""Models whose bounds are of pixels times frames of a patch, and which first enlarge what is smaller than a token."""
_ARGUMENTS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
"""Kind of media -> arguments of the model for its patches and their grids."""
_TYPES = {"image": 1, "video": 2}
"""Kind of media -> what transformers calls its token type; text is 0."""
_TRIED = ((1, 2), (3, 2))
"""Height and width in tokens of the images of a probe: different, so that exchanged positions show."""


def fitted_size(
    height: int,
    width: int,
    *,
    factor: int,
    min_pixels: float,
    max_pixels: float,
    num_frames: int = 1,
    per_patch: int = 1,
) -> tuple[int, int]:
    """Height and width, multiples of `factor`, whose area is between the bounds and whose shape is kept.

    Round both to the nearest multiple. Where the area is too large, divide both sides by sqrt(h w / max_pixels) and
    round down, to at least one factor; where it is too small, multiply by sqrt(min_pixels / (h w)) and round up.

    Args:
        height, width: before.
        factor: of both sides after.
        min_pixels, max_pixels: the bounds.
        num_frames: areas are those of so many frames together; they are compared with the bounds as whole groups.
        per_patch: frames of such a group.

    Raises:
        ValueError: one side is more than MAX_ASPECT times the other.

    Source: Wang et al. 2024, arXiv:2409.12191, section 2.1 (dynamic resolution), as their processor rounds.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"one side of {width}x{height} is more than {MAX_ASPECT} times the other; crop it")
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    counted = round(num_frames / per_patch) * per_patch
    if counted * high * wide > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        high = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif counted * high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        high = math.ceil(height * grow / factor) * factor
        wide = math.ceil(width * grow / factor) * factor
    return high, wide


class GridProcessor(MediaProcessor):
    """Sizes into patches and tokens, files into patches."""

    def __init__(self, image_processor: Any, model_config: Any, *, folder: Path) -> None:
        """Read sizes and token ids.

        Args:
            image_processor: of transformers, for models whose patches are counted by a grid.
            model_config: the model's configuration, which names the tokens of media.
            folder: where its settings are.

        Raises:
            ValueError: the settings of videos cannot be used.
        """
        super().__init__(folder)
        self._processor = image_processor
        self.patch_size = int(image_processor.patch_size)
        self.merge_size = int(image_processor.merge_size)
        """Patches along each side that become one token."""
        self.frames_per_patch = int(image_processor.temporal_patch_size)
        self.token_ids = self.placeholder_ids = grid_token_ids(model_config)
        self.border_ids = frozenset(
            int(token)
            for side in ("start", "end")
            for name in (f"vision_{side}_token_id", f"image_{side}_token_id")
            if (token := getattr(model_config, name, None)) is not None
        )
        self._counts_frames = model_config.model_type in _FRAMES_IN_BOUNDS
        has_stamps = _TAKES_VIDEOS.get(model_config.model_type)
        self.video: VideoSettings | None = None
        if has_stamps is not None:
            self.video = load_video_settings(folder, image_processor, has_stamps=has_stamps)
        borders = (getattr(model_config, f"vision_{side}_token_id", None) for side in ("start", "end"))
        self.around_step = tuple(int(token) for token in borders if token is not None)

    def grid(self, kind: str, size: tuple[int, int], num_frames: int = 1) -> tuple[int, int, int]:
        """Patches along time, height and width of a picture of this width and height.

        Raises:
            ValueError: its shape is extreme, or it is not resized and does not divide into patches.
        """
        width, height = size
        factor = self.patch_size * self.merge_size
        video = self.video if kind == "video" else None
        if getattr(self._processor if video is None else video, "do_resize", True):
            bounds, grows, per = self._bounds(), self._counts_frames, 1
            if video is not None:
                bounds = {**video.size, "longest_edge": video.max_pixels(num_frames)}
                grows, per = video.has_stamps, video.temporal_patch_size
            if grows and min(height, width) < factor:
                larger = max(factor / height, factor / width)
                height, width = int(height * larger), int(width * larger)
            height, width = fitted_size(
                height,
                width,
                factor=factor,
                min_pixels=bounds["shortest_edge"],
                max_pixels=bounds["longest_edge"],
                num_frames=max(num_frames, per) if video is not None and video.has_stamps else 1,
                per_patch=per if video is not None and video.has_stamps else 1,
            )
        elif height % factor or width % factor:
            raise ValueError(
                f"the {kind} has {width}x{height} pixels, and the image processor of the model does not resize: make "
                f"both sides multiples of {factor}"
            )
        steps = -(-num_frames // self.frames_per_patch) if kind == "video" else 1
        return steps, height // self.patch_size, width // self.patch_size

    @property
    def most_tokens(self) -> int | None:  # type: ignore[override]
        """Number of tokens of the largest image; None where images are not resized."""
        if not getattr(self._processor, "do_resize", True):
            return None
        return int(self._bounds()["longest_edge"]) // (self.patch_size * self.merge_size) ** 2

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens that stand for this many patches."""
        return math.prod(grid) // self.merge_size**2

    def _make(self, media: Media) -> Tensor:
        """Patches [t h w, C frames_per_patch patch_size^2]."""
        return self._of_video(media) if media.kind == "video" else self._of_image(media)

    def _of_image(self, media: Media) -> Tensor:
        inputs = self._processor(images=upright_pictures(media.parts[0], every=False), return_tensors="np")
        patches: NDArray[np.float32] = inputs["pixel_values"]
        self._check_grid(media, tuple(int(n) for n in inputs["image_grid_thw"][0]))
        return torch.from_numpy(np.ascontiguousarray(patches, dtype=np.float32))

    def _of_video(self, media: Media) -> Tensor:
        assert self.video is not None, "a model without videos counts none"
        if media.frames:
            if film_key(digest_of(media.parts[0]), media.frames) != media.key:
                raise ValueError(
                    f"the {media.kind} {media.parts[0]!r:.200} has changed since its tokens were counted"
                )
            frames = read_frames(media.parts[0], media.frames)
        else:
            stills = [upright_pictures(part, every=False)[0] for part in media.parts]
            if len({still.size for still in stills}) > 1:
                raise ValueError("the frames of a video have different sizes; make them equal")
            frames = torch.from_numpy(np.stack([np.asarray(still) for still in stills])).permute(0, 3, 1, 2)
        high, wide = frames.shape[-2:]
        self._check_grid(media, self.grid("video", (wide, high), len(frames)))
        return self.video.patches(frames, media.grid)

    def _check_grid(self, media: Media, grid: tuple[int, ...]) -> None:
        if grid != media.grid:
            raise changed(media, grid, media.grid, "patches (time, height, width)")

    def _bounds(self) -> Mapping[str, float]:
        """Fewest and most pixels of an image, under the processor's names."""
        names, size = ("shortest_edge", "longest_edge"), self._processor.size
        if not self._counts_frames:
            return {name: size[name] for name in names}
        return {name: size[name] / self.frames_per_patch for name in names}


class GridVision(Vision):
    """The vision side of a model with `get_rope_index`."""

    def __init__(self, module: Any, processor: MediaProcessor | None) -> None:
        """Find the model's own functions."""
        settings = module.config.vision_config
        width = getattr(settings, "in_channels", 3) * settings.temporal_patch_size * settings.patch_size**2
        super().__init__(
            module, processor, grid_token_ids(module.config), getattr(module.base_model, "visual", None)
        )
        self.merge_size = int(settings.spatial_merge_size)
        """Patches along each side that become one token."""
        self.patch_shape: tuple[int, ...] = (int(width),)
        self._get_rope_index = module.base_model.get_rope_index
        self._tells_seconds = "second_per_grid_ts" in inspect.signature(self._get_rope_index).parameters

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens that stand for this many patches."""
        return math.prod(grid) // self.merge_size**2

    def positions(self, token_ids: Tensor, media: Sequence[Media]) -> Tensor:
        """Positions [3, n] of tokens [n] with media, on the CPU; what follows goes on after the largest one."""
        grids = {
            name: torch.tensor([medium.grid for medium in media if medium.kind == kind])
            for kind, (_, name) in _ARGUMENTS.items()
            if any(medium.kind == kind for medium in media)
        }
        seconds = [medium.seconds_per_patch for medium in media if medium.kind == "video"]
        if seconds and self._tells_seconds:
            grids["second_per_grid_ts"] = torch.tensor(seconds)
        return self._placed(token_ids, grids)

    def arguments_of(self, kind: str, chosen: Sequence[Media], pixels: Tensor) -> Mapping[str, Tensor]:
        """pixel_values [patches, ...] and image_grid_thw [images, 3], or the same of videos."""
        patches, grids = _ARGUMENTS[kind]
        return {
            patches: pixels,
            grids: torch.tensor([medium.grid for medium in chosen], device=pixels.device),
        }

    def features_of_nothing(self, device: torch.device) -> Sequence[Tensor]:
        """Features of an image of one token, made of zeros."""
        side = self.merge_size
        seen = self.module.base_model.get_image_features(
            torch.zeros(side * side, *self.patch_shape, device=device),
            torch.tensor([[1, side, side]], device=device),
            return_dict=True,
        )
        return _tensors([seen.pooler_output, getattr(seen, "deepstack_features", None)])

    def trials(self, device: torch.device) -> Sequence[Trial]:
        """An image of 1 x 2 tokens, and one of 3 x 2."""
        trials = []
        for number, (high, wide) in enumerate(_TRIED):
            size = torch.Size((high * wide * self.merge_size**2, *self.patch_shape))
            shades = torch.linspace(-1.0, 1.0 + number, size.numel(), device=device).view(size)
            grids = torch.tensor([[1, high * self.merge_size, wide * self.merge_size]], device=device)
            arguments = {"pixel_values": shades, "image_grid_thw": grids}
            trials.append(Trial(num_tokens=high * wide, arguments=arguments))
        return trials

    def trial_positions(self, token_ids: Tensor, arguments: Mapping[str, Tensor]) -> Tensor:
        """Positions [3, n]."""
        return self._placed(token_ids, {"image_grid_thw": arguments["image_grid_thw"]})

    def own_arguments(self, token_ids: Tensor) -> Mapping[str, Tensor]:
        """The type of each token."""
        types = torch.zeros_like(token_ids, dtype=torch.int32)
        for kind, token in self.token_ids.items():
            types[token_ids == token] = _TYPES[kind]
        return {"mm_token_type_ids": types[None]}

    def _placed(self, token_ids: Tensor, grids: Mapping[str, Tensor]) -> Tensor:
        """Positions [3, n] of tokens [n] by the model's own rule."""
        positions, _ = self._get_rope_index(token_ids[None], **self.own_arguments(token_ids), **grids)
        text_positions: Tensor = positions[:, 0]
        return text_positions


def grid_token_ids(model_config: object) -> dict[str, int]:
    """Kind of media -> id of its token, for the kinds that a model has."""
    return {
        kind: int(token)
        for kind in ("image", "video")
        if (token := getattr(model_config, f"{kind}_token_id", None)) is not None
    }


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested lists."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value or () for tensor in _tensors(part)]
