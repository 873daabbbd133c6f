"""Images and videos as rows and tools give them: contents, paths, Pillow images."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.engines.multimodal.image_reader import picture_size
from strop.engines.multimodal.video_settings import Sampling

_DATA_ADDRESS = re.compile(r"data:[^,]*;base64,")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


_RATE = 2.0
"""Frames per second of a video that is given as frames, as qwen-vl-utils has it."""
_SAMPLING = {
    "fps": "fps",
    "nframes": "num_frames",
    "num_frames": "num_frames",
    "min_frames": "min_frames",
    "max_frames": "max_frames",
}
"""Keys of a row about a video's frames, as in qwen-vl-utils -> our name."""
_FRAME_RATES = ("sample_fps", "fps")
"""Keys of a row with the frame rate of a video that it gives as frames."""
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys of a row about the size of an image, as in qwen-vl-utils."""
_FILE_KEYS = frozenset({"bytes", "path", "video", "type"})


@dataclass(frozen=True, kw_only=True)
class MediaSource:
    """An image or a video."""

    kind: str
    files: tuple[Any, ...]
    """Contents (bytes), path, or Pillow image: one for an image and for a video in a file, else one per frame."""
    is_film: bool = False
    """A video in one file."""
    sampling: Sampling = field(default_factory=Sampling)
    """Selection of its frames that the row asks for."""
    frame_rate: float = _RATE
    """Frames per second of a video that is given as frames."""

    @property
    def identity(self) -> list[str]:
        """Equal for the same media: paths, or digests of contents, and what is asked of a video."""
        files = [
            hashlib.blake2b(file, digest_size=16).hexdigest() if isinstance(file, bytes) else repr(file)
            for file in self.files
        ]
        return [*files, repr(self.sampling)] if self.sampling.is_given else files

    def measure(self) -> tuple[tuple[int, int], int]:
        """Width and height, and number of files, from the heads of images or frames.

        Raises:
            ValueError: a file cannot be read, frames have different sizes, or one of them moves.
        """
        sizes = [_size(file) for file in self.files]
        if any(size != sizes[0][0] for size, _ in sizes):
            raise ValueError("the frames of a video have different sizes; make them equal")
        if self.kind == "video" and any(count > 1 for _, count in sizes):
            raise ValueError(
                "a frame of a video is an animated picture; give the file alone and not in a list, or frames that do "
                "not move"
            )
        return sizes[0][0], len(sizes)

    def encoded(self) -> tuple[bytes | str, ...]:
        """Contents or path of each file."""
        return tuple(file if isinstance(file, bytes | str) else _encoded(file) for file in self.files)


def source_of(kind: str, value: object, where: str) -> MediaSource:
    """The image or video that a value is.

    Raises:
        ValueError: it has an unknown form.
    """
    if kind == "video":
        return _video(value, where)
    if isinstance(value, Mapping) and (sizes := [key for key in _SIZES if value.get(key) is not None]):
        raise ValueError(
            f"{where} has an image with {', '.join(sizes)}: the size of images is set for all of them, with `size` in "
            f"the model folder's preprocessor_config.json; resize the image, or leave the key out"
        )
    return MediaSource(kind=kind, files=(_file(value, kind, where),))


def _video(value: object, where: str) -> MediaSource:
    entry = (
        {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else {}
    )
    source = entry.get("video", value)
    if isinstance(source, Mapping) and source is not value:
        return _video({**entry, "video": None, **source}, where)
    options = {key: item for key, item in entry.items() if key not in _FILE_KEYS}
    if isinstance(source, list | tuple):
        if not source:
            raise ValueError(f"{where} has a video without frames")
        rates = [_number(key, options.pop(key), where) for key in _FRAME_RATES if key in options]
        _refuse_unknown(options, _FRAME_RATES, where)
        files = tuple(_file(file, "video", where) for file in source)
        return MediaSource(kind="video", files=files, frame_rate=rates[0] if rates else _RATE)
    _refuse_unknown({key: item for key, item in options.items() if key not in _SAMPLING}, _SAMPLING, where)
    file = _file(source, "video", where)
    try:
        sampling = Sampling(**{_SAMPLING[key]: _number(key, item, where) for key, item in options.items()})
    except ValueError as error:
        raise ValueError(f"{where} has a video with {options}: {error}") from error
    return MediaSource(kind="video", files=(file,), is_film=isinstance(file, bytes | str), sampling=sampling)


def _number(key: str, value: object, where: str) -> Any:
    """A rate, or a whole number of frames."""
    is_rate = key in _FRAME_RATES
    if isinstance(value, bool) or not isinstance(value, int | float) or not (is_rate or value == int(value)):
        kind = "number" if is_rate else "whole number"
        raise ValueError(f"{where} has a video whose {key} is {value!r}; give a {kind}")
    if value <= 0:
        raise ValueError(f"{where} has a video whose {key} is {value}; it must be above 0")
    return float(value) if is_rate else int(value)


def _refuse_unknown(options: Mapping[str, Any], supported: Iterable[str], where: str) -> None:
    if options:
        raise ValueError(
            f"{where} has a video with {', '.join(options)}; a row may say {', '.join(supported)}: the size of frames "
            f"is set for all videos, with `size` in the model folder's video_preprocessor_config.json"
        )


def _file(value: object, kind: str, where: str) -> Any:
    """Contents, path or Pillow image of one file."""
    if isinstance(value, Mapping):
        sources = [value[key] for key in ("bytes", "path", kind, "image") if value.get(key) is not None]
        if sources and isinstance(sources[0], Mapping):  # a file in a part with settings beside it
            return _file(sources[0], kind, where)
        value = sources[0] if sources else None
    if isinstance(value, bytes | bytearray):
        return bytes(value) if isinstance(value, bytearray) else value
    if isinstance(value, str):
        if contents := _DATA_ADDRESS.match(value):
            try:
                return base64.b64decode(value[contents.end() :], validate=True)
            except ValueError as error:
                raise ValueError(f"{where} has a {kind} whose base64 cannot be decoded: {error}") from error
        path = value.removeprefix("file://")
        if _SCHEME.match(path) and not Path(path).exists():
            raise ValueError(
                f"{where} names a {kind} by the address {path[:80]!r}, which is not fetched; download it and give its "
                f"path"
            )
        return path
    if hasattr(value, "save") and hasattr(value, "size"):  # a Pillow image, which need not be installed
        return value
    raise ValueError(
        f"{where} has a {kind} of type {type(value).__name__}; give a path, encoded bytes, an object with `bytes` or "
        f"`path`, or a Pillow image"
    )


def _size(file: Any) -> tuple[tuple[int, int], int]:
    """Width and height, and number of frames."""
    if isinstance(file, bytes | str):
        return picture_size(file)
    width, height = file.size
    return (int(width), int(height)), 1


def _encoded(image: Any) -> bytes:
    """A Pillow image as a file, without loss."""
    file = io.BytesIO()
    image.convert("RGB").save(file, format="PNG")
    return file.getvalue()
