"""Images and videos into the patches that a vision tower takes.

The image processor of transformers that lies beside the model does the resizing, scaling and cutting, with its
Pillow and numpy back end, so that a picture gives the same pixels on every machine. How many patches there will
be follows from the size alone, which is in the head of a file: nothing is decoded before a model needs it.

Patches are made once per process: they are kept, up to a bound, under the key of the picture.
"""

from __future__ import annotations

import functools
import io
import math
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor

from strop.engines.model_folder import model_json, reading
from strop.trajectory import Media

T = TypeVar("T")

PROCESSOR_FILE = "preprocessor_config.json"
_VIDEO_FILE = "video_preprocessor_config.json"
SETTINGS = (PROCESSOR_FILE, _VIDEO_FILE, "processor_config.json", "chat_template.json")
"""Files of a model folder that say how its media are read."""
MAX_KEPT_BYTES = 1 << 30
"""Patches kept per process: those of a few hundred pictures of 448 x 448, a step's worth."""
MAX_ASPECT = 200
"""Longest side over shortest side that is accepted, as in the reference of the Qwen models."""
_CONTIGUOUS_VIDEOS = frozenset({"qwen2_vl", "qwen2_5_vl"})
_FRAMES_IN_BOUNDS = frozenset({"glm4v", "glm4v_moe", "glm46v"})
"""Models whose bounds are of pixels times frames of a patch, and which first enlarge what is smaller than a token."""
_ROTATED = frozenset({5, 6, 7, 8})
"""EXIF orientations that exchange width and height."""
_EXIF_ORIENTATION = 0x0112


def fitted_size(
    height: int, width: int, *, factor: int, min_pixels: float, max_pixels: float
) -> tuple[int, int]:
    """Height and width, multiples of `factor`, whose area is between the bounds and whose shape is kept.

    Round both to the nearest multiple. Where the area is too large, divide both sides by sqrt(h w / max_pixels) and
    round down, to at least one factor; where it is too small, multiply by sqrt(min_pixels / (h w)) and round up.

    Raises:
        ValueError: one side is more than MAX_ASPECT times the other.

    Source: Wang et al. 2024, arXiv:2409.12191, section 2.1 (dynamic resolution), as their processor rounds.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"one side of {width}x{height} is more than {MAX_ASPECT} times the other; crop it")
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        high = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        high = math.ceil(height * grow / factor) * factor
        wide = math.ceil(width * grow / factor) * factor
    return high, wide


class MediaProcessor:
    """How one model sees pictures: sizes into patches and tokens, files into pixels."""

    def __init__(
        self,
        image_processor: Any,
        model_config: Any,
        *,
        folder: Path,
        video_size: dict[str, int] | None = None,
    ) -> None:
        """Read sizes and token ids.

        Args:
            image_processor: of transformers, for models whose patches are counted by a grid.
            model_config: the model's configuration, which names the tokens of media.
            folder: where its settings are.
            video_size: bounds of a frame's pixels; those of an image where it is None.
        """
        self._processor = image_processor
        self._folder = folder
        self._video_size = video_size
        self.patch_size = int(image_processor.patch_size)
        self.merge_size = int(image_processor.merge_size)
        """Patches along each side that become one token."""
        self.frames_per_patch = int(image_processor.temporal_patch_size)
        self.token_ids = media_token_ids(model_config)
        """Kind of media -> id of the token that stands for a part of it."""
        self.border_ids = frozenset(
            int(token)
            for side in ("start", "end")
            for name in (f"vision_{side}_token_id", f"image_{side}_token_id")
            if (token := getattr(model_config, name, None)) is not None
        )
        """Ids of the tokens around the tokens of a picture."""
        self._counts_frames = model_config.model_type in _FRAMES_IN_BOUNDS
        self.takes_videos = model_config.model_type in _CONTIGUOUS_VIDEOS
        """Whether a video is one run of tokens, without text between its frames."""
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._kept_bytes = 0
        self.num_made = 0
        """Pictures turned into patches so far."""

    def grid(self, kind: str, size: tuple[int, int], num_frames: int = 1) -> tuple[int, int, int]:
        """Patches along time, height and width of a picture of this width and height.

        Raises:
            ValueError: its shape is extreme, or it is not resized and does not divide into patches.
        """
        width, height = size
        factor = self.patch_size * self.merge_size
        if getattr(self._processor, "do_resize", True):
            bounds = self._bounds(kind)
            if self._counts_frames and min(height, width) < factor:
                larger = max(factor / height, factor / width)
                height, width = int(height * larger), int(width * larger)
            height, width = fitted_size(
                height,
                width,
                factor=factor,
                min_pixels=bounds["shortest_edge"],
                max_pixels=bounds["longest_edge"],
            )
        elif height % factor or width % factor:
            raise ValueError(
                f"the {kind} has {width}x{height} pixels, and the image processor of the model does not resize: make "
                f"both sides multiples of {factor}"
            )
        steps = -(-num_frames // self.frames_per_patch) if kind == "video" else 1
        return steps, height // self.patch_size, width // self.patch_size

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens that stand for this many patches."""
        return math.prod(grid) // self.merge_size**2

    def patches(self, media: Media) -> Tensor:
        """Pixels [t h w, C frames_per_patch patch_size^2] float32 of a picture, from files or from an earlier call.

        Raises:
            ValueError: a file is missing, no picture, or has other sizes than when its tokens were counted.
        """
        key = f"{media.kind} {media.key}"
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        patches = self._make(media)
        self.num_made += 1
        self._kept[key] = patches
        self._kept_bytes += patches.nbytes
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return patches

    def save(self, folder: Path) -> None:
        """Copy the settings into another model folder."""
        for name in SETTINGS:
            if (self._folder / name).is_file() and self._folder.resolve() != folder.resolve():
                shutil.copyfile(self._folder / name, folder / name)

    def _make(self, media: Media) -> Tensor:
        frames = [frame for part in media.parts for frame in _decoded(part, every=media.kind == "video")]
        options = {} if media.kind == "image" else {"size": self._bounds("video")}
        made = self._processor(images=frames, return_tensors="np", **options)
        patches: NDArray[np.float32] = made["pixel_values"]
        grids = [tuple(int(n) for n in grid) for grid in made["image_grid_thw"]]
        if media.kind == "video":
            patches, grids = self._joined_frames(patches, grids)
        if grids != [media.grid]:
            raise ValueError(
                f"a {media.kind} has {grids} patches (time, height, width), but {media.grid} when its tokens were "
                f"counted; did the file change since the run started?"
            )
        with torch.inference_mode(False):  # generation makes them, and training uses them
            return torch.from_numpy(np.ascontiguousarray(patches, dtype=np.float32))

    def _joined_frames(
        self, patches: NDArray[np.float32], grids: Sequence[tuple[int, ...]]
    ) -> tuple[NDArray[np.float32], list[tuple[int, ...]]]:
        """Patches of single frames as patches over time; the last frame is repeated where one is missing.

        The processor gives each frame as if it stood still: all time slices of its patches are the same.
        """
        if len(set(grids)) > 1:
            raise ValueError("the frames of a video have different sizes; make them equal")
        count, (_, high, wide), per = len(grids), grids[0], self.frames_per_patch
        still = patches.reshape(count, high * wide, -1, per, self.patch_size**2)
        order = np.minimum(np.arange(-(-count // per) * per), count - 1)
        moving = still[order, :, :, 0].reshape(-1, per, high * wide, still.shape[2], self.patch_size**2)
        joined = moving.transpose(0, 2, 3, 1, 4).reshape(-1, patches.shape[1])
        return joined, [(len(order) // per, high, wide)]

    def _bounds(self, kind: str) -> Mapping[str, float]:
        """Fewest and most pixels of a picture, under the processor's names."""
        if kind == "video" and self._video_size is not None:
            return self._video_size
        names, size = ("shortest_edge", "longest_edge"), self._processor.size
        if not self._counts_frames:
            return {name: size[name] for name in names}
        return {name: size[name] / self.frames_per_patch for name in names}


def media_token_ids(model_config: Any) -> dict[str, int]:
    """Kind of media -> id of its token, for the kinds that a model has."""
    return {
        kind: int(token)
        for kind in ("image", "video")
        if (token := getattr(model_config, f"{kind}_token_id", None)) is not None
    }


def load_media_processor(folder: str | Path) -> MediaProcessor | None:
    """The processor of a model folder; None for a model that takes text alone.

    One per folder and process, so that all who need the pixels of a picture share them.

    Raises:
        ValueError: the folder has an image processor that cannot be used here.
    """
    path = Path(folder)
    settings = path / PROCESSOR_FILE
    if not settings.is_file() or not (path / "config.json").is_file():
        return None
    return _load(str(path.resolve()), settings.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _load(folder: str, _changed: int) -> MediaProcessor | None:
    with reading(folder, f"model folder {folder!r} cannot be used"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if not takes_media(config):
        return None
    try:
        auto_class: Any = AutoImageProcessor
        processor = auto_class.from_pretrained(folder, backend="pil", trust_remote_code=False)
    except (ImportError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"the image processor of {folder!r} cannot be used ({reason}); install Pillow: pip install 'strop[vision]'"
        ) from error
    video = Path(folder) / _VIDEO_FILE
    size = (
        model_json(video, f"model folder {folder!r} cannot be used").get("size") if video.is_file() else None
    )
    return MediaProcessor(processor, config, folder=Path(folder), video_size=size)


def takes_media(config: Any) -> bool:
    """Whether a model reads pictures by patches in a grid, as those of the Qwen-VL family do."""
    vision = getattr(config, "vision_config", None)
    return bool(media_token_ids(config)) and getattr(vision, "spatial_merge_size", None) is not None


def picture_size(part: bytes | str) -> tuple[tuple[int, int], int]:
    """Width and height of a picture, and its number of frames, from the head of the file.

    Raises:
        ValueError: there is no such file, or it is no picture.
    """

    def measure(image: Any) -> tuple[tuple[int, int], int]:
        width, height = image.size
        if image.getexif().get(_EXIF_ORIENTATION) in _ROTATED:
            width, height = height, width
        return (width, height), int(getattr(image, "n_frames", 1))

    return _with_image(part, measure)


def _decoded(part: bytes | str, *, every: bool) -> list[Any]:
    """The picture of a file, upright and in red, green and blue; `every` frame of it, or the first."""
    from PIL import ImageOps, ImageSequence

    def decode(image: Any) -> list[Any]:
        frames = ImageSequence.Iterator(image) if every else [image]
        return [ImageOps.exif_transpose(frame).convert("RGB") for frame in frames]

    return _with_image(part, decode)


def _with_image(part: bytes | str, use: Callable[[Any], T]) -> T:
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(
            "rows with images need Pillow; install it with: pip install 'strop[vision]'"
        ) from error
    named = f"the file {part!r}" if isinstance(part, str) else f"an image of {len(part)} bytes"
    try:
        with Image.open(io.BytesIO(part) if isinstance(part, bytes) else part) as image:
            return use(image)
    except FileNotFoundError as error:
        raise ValueError(f"{named} does not exist; paths in rows start at the current directory") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{named} cannot be read as a picture ({reason}); use PNG, JPEG, WebP or GIF"
        ) from error
