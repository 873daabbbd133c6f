"""Video settings of models of the Qwen-VL family: frames, sizes and values of pixels.

transformers has this in its video processors, which need torchvision. Here are their formulas, on the settings of the
same files, with the 8-bit resizing of torch that torchvision calls; a file gives the same frames, sizes and pixels.

    frames of a file    0 1 2 3 4 5 6 7 8 9     10 frames a second
    2 a second          0         5             Qwen2-VL, Qwen2.5-VL: even steps from the first one
    2 a second          0       4   5     9     Qwen3-VL: even steps up to the last one, at least min_frames (4)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.engines.model_folder import model_json

MAX_FRAMES = 768
"""Most frames of a video, as in the processors of the Qwen models."""
_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
_RESAMPLING = {2: "bilinear", 3: "bicubic"}
"""Numbers of Pillow's filters -> names of torch."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Selection of the frames of a video file. None: not set."""

    fps: float | None = None
    """Frames per second."""
    num_frames: int | None = None
    """Frames of the whole video, whatever its length."""
    min_frames: int | None = None
    max_frames: int | None = None
    """Bounds of what `fps` gives."""

    def __post_init__(self) -> None:
        if self.fps is not None and self.num_frames is not None:
            raise ValueError("fps and nframes are both given; give one of them")
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")

    @property
    def is_given(self) -> bool:
        """Something is said."""
        return any(value is not None for value in vars(self).values())


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """Video settings of one model; names as in the files of transformers."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    has_stamps: bool
    """Qwen3-VL: text with the time stands before the tokens of each patch of time; its bounds are of all frames."""
    size: Mapping[str, float]
    """shortest_edge, longest_edge: fewest and most pixels of a frame; with stamps, of all frames together."""
    sampling: Sampling
    do_sample_frames: bool
    """Without it all frames are taken, unless a row says which."""
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    rescale_factor: float = 1 / 255
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    resample: int = 3
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 0

    def __post_init__(self) -> None:
        if self.resample not in _RESAMPLING:
            raise ValueError(
                f"resample is {self.resample} for videos; 2 (bilinear) and 3 (bicubic) are known"
            )

    def frames(self, num_frames: int, fps: float, asked: Sampling) -> list[int]:
        """Numbers of the frames that are taken of a file.

        Args:
            num_frames: of the file.
            fps: of the file.
            asked: what a row says; it goes before what the model folder says.

        Raises:
            ValueError: too many, or more than there are.
        """
        rule = self._rule(asked)
        if rule is None:
            chosen = list(range(num_frames))
        elif self.has_stamps:
            chosen = _up_to_the_last(num_frames, fps, rule)
        else:
            chosen = _even_steps(num_frames, fps, rule, self.temporal_patch_size)
        return _bounded(chosen, "say which in the row, {'video': FILE, 'fps': 2} or with nframes")

    def given_frames(self, num_frames: int) -> list[int]:
        """All frames of a video that is given as frames.

        Raises:
            ValueError: too many.
        """
        return _bounded(list(range(num_frames)), "give fewer")

    def _rule(self, asked: Sampling) -> Sampling | None:
        """Selection of a row, completed by the model folder; None for all frames."""
        default = self.sampling
        bounds = {
            "min_frames": default.min_frames if asked.min_frames is None else asked.min_frames,
            "max_frames": default.max_frames if asked.max_frames is None else asked.max_frames,
        }
        if asked.fps is not None or asked.num_frames is not None:
            return dataclasses.replace(asked, **bounds)
        if not self.do_sample_frames or (default.fps is None and default.num_frames is None):
            if asked.is_given:
                raise ValueError("min_frames and max_frames bound what fps gives; give fps too")
            return None
        return dataclasses.replace(default, **bounds)

    def stamps(self, frames: Sequence[int], fps: float) -> list[float]:
        """Seconds of each patch of time: the mean of its first and its last frame."""
        per = self.temporal_patch_size
        full = [*frames, *[frames[-1]] * (-len(frames) % per)]
        return [(full[at] / fps + full[at + per - 1] / fps) / 2 for at in range(0, len(full), per)]

    def seconds_per_patch(self, num_taken: int, num_frames: int, fps: float) -> float:
        """Time from one patch of time to the next, where positions tell it (Qwen2.5-VL)."""
        return self.temporal_patch_size / (num_taken / num_frames * fps)

    def max_pixels(self, num_frames: int) -> float:
        """Most pixels of a frame; with stamps, of all frames together."""
        longest = self.size["longest_edge"]
        if not self.cap_pixels_per_frame:
            return longest
        token, least = (self.patch_size * self.merge_size) ** 2, int(self.size["shortest_edge"] * 1.05)
        if self.has_stamps:
            share = min(self.max_video_tokens * token, longest // num_frames)
            return max(share, least) * num_frames
        total = int(self.max_video_tokens * token * 0.9)
        return max(min(longest, total * self.temporal_patch_size // num_frames), least)

    def patches(self, frames: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Patches [t h w, C temporal_patch_size patch_size^2] float32 of frames [F, C, H, W] uint8.

        Where frames are missing for a full patch of time, the last one is repeated.
        """
        steps, high, wide = grid
        sides = (high * self.patch_size, wide * self.patch_size)
        if self.do_resize and tuple(frames.shape[-2:]) != sides:
            frames = torch.nn.functional.interpolate(
                frames.contiguous(), sides, mode=_RESAMPLING[self.resample], antialias=True
            )
        values = self._scaled(frames)
        per, merge, side = self.temporal_patch_size, self.merge_size, self.patch_size
        missing = steps * per - len(values)
        values = torch.cat([values, values[-1:].expand(missing, -1, -1, -1)])
        channels = values.shape[1]
        cut = values.view(steps, per, channels, high // merge, merge, side, wide // merge, merge, side)
        ordered = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # time, place, place in token, channel, frame, pixel
        return ordered.reshape(steps * high * wide, channels * per * side * side).contiguous()

    def _scaled(self, frames: Tensor) -> Tensor:
        mean, std = torch.tensor(self.image_mean), torch.tensor(self.image_std)
        if self.do_rescale and self.do_normalize:  # in one step, rounded as in transformers
            mean, std = mean * (1.0 / self.rescale_factor), std * (1.0 / self.rescale_factor)
            frames = frames.to(torch.float32)
        elif self.do_rescale:
            return frames * self.rescale_factor
        if not self.do_normalize:
            return frames.to(torch.float32)
        return frames.to(torch.float32).sub(mean[:, None, None]).div_(std[:, None, None])


def _bounded(chosen: list[int], remedy: str) -> list[int]:
    if len(chosen) > MAX_FRAMES:
        raise ValueError(f"a video has {len(chosen)} frames, over the limit of {MAX_FRAMES}; {remedy}")
    return chosen


def _even_steps(num_frames: int, fps: float, rule: Sampling, per: int) -> list[int]:
    """Qwen2-VL and Qwen2.5-VL: an even number of frames (in general, whole patches), in even steps from the first."""
    count: float
    if rule.num_frames is not None:
        count = round(rule.num_frames / per) * per
    else:
        assert rule.fps is not None, "one of the two is given"
        most = math.floor(min(rule.max_frames or num_frames, num_frames) / per) * per
        count = min(max(num_frames / fps * rule.fps, rule.min_frames or 0), most, num_frames)
        count = math.floor(count / per) * per
    if not 0 < count <= num_frames:
        raise ValueError(
            f"{count} of the {num_frames} frames of a video would be taken; they are taken in groups of {per}: give "
            f"other nframes or fps, or a longer video"
        )
    return [int(number) for number in torch.arange(0, num_frames, num_frames / count).int()]


def _up_to_the_last(num_frames: int, fps: float, rule: Sampling) -> list[int]:
    """Qwen3-VL: even steps from the first frame to the last one, rounded."""
    count = rule.num_frames
    if count is None:
        assert rule.fps is not None, "one of the two is given"
        count = int(num_frames / fps * rule.fps)
        count = min(max(count, rule.min_frames or 1), rule.max_frames or num_frames, num_frames)
    return [int(number) for number in np.linspace(0, num_frames - 1, count).round()]


def load_video_settings(folder: Path, image_processor: Any, *, has_stamps: bool) -> VideoSettings:
    """The settings of a model folder: of processor_config.json, else of the video's file, else of the image's.

    Args:
        folder: of the model.
        image_processor: of the same folder; its patches are those of videos too.
        has_stamps: Qwen3-VL.

    Raises:
        ValueError: a file cannot be read, or a setting is not known here.
    """
    settings = _given(folder)
    size = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    if has_stamps:
        size, mean, std = (
            {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
            (0.5,) * 3,
            (0.5,) * 3,
        )
    size |= settings.get("size") or {}
    for name, old in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        size[name] = size[name] if settings.get(old) is None else settings[old]
    num_frames = settings.get("num_frames")
    fps = settings.get("fps", 2 if has_stamps and num_frames is None else None)
    plain = ("rescale_factor", "do_resize", "do_rescale", "do_normalize", "resample")
    try:
        return VideoSettings(
            patch_size=int(image_processor.patch_size),
            merge_size=int(image_processor.merge_size),
            temporal_patch_size=int(image_processor.temporal_patch_size),
            has_stamps=has_stamps,
            size=size,
            sampling=Sampling(
                fps=fps,
                num_frames=num_frames,
                min_frames=settings.get("min_frames", 4),
                max_frames=settings.get("max_frames", MAX_FRAMES),
            ),
            do_sample_frames=bool(settings.get("do_sample_frames", has_stamps)),
            image_mean=tuple(settings.get("image_mean") or mean),
            image_std=tuple(settings.get("image_std") or std),
            cap_pixels_per_frame=bool(settings.get("cap_pixels_per_frame")),
            max_video_tokens=int(settings.get("max_video_tokens") or (768 if has_stamps else 128000)),
            **{name: settings[name] for name in plain if settings.get(name) is not None},
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"the video settings of {str(folder)!r} cannot be used: {error}") from error


def _given(folder: Path) -> dict[str, Any]:
    """Contents of the first file that has settings of videos."""
    where = f"model folder {str(folder)!r} cannot be used"
    nested = folder / "processor_config.json"
    if nested.is_file() and (settings := model_json(nested, where).get("video_processor")):
        return dict(settings)
    return next((model_json(folder / name, where) for name in _FILES if (folder / name).is_file()), {})
