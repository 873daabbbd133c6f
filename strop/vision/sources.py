"""Images and videos as rows and tools give them: contents, paths, Pillow images."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.vision.pixels import picture_size

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class MediaSource:
    """An image or a video."""

    kind: str
    files: tuple[Any, ...]
    """Contents (bytes), path, or Pillow image: one for an image, one per frame for a video."""

    @property
    def identity(self) -> list[str]:
        """Equal for the same media: paths, or digests of contents."""
        return [
            hashlib.blake2b(file, digest_size=16).hexdigest() if isinstance(file, bytes) else repr(file)
            for file in self.files
        ]

    def measure(self) -> tuple[tuple[int, int], int]:
        """Width and height, and number of frames, from the heads of the files.

        Raises:
            ValueError: a file cannot be read, or frames have different sizes.
        """
        sizes = [_size(file) for file in self.files]
        if any(size != sizes[0][0] for size, _ in sizes):
            raise ValueError("the frames of a video have different sizes; make them equal")
        return sizes[0][0], sum(count for _, count in sizes)

    def encoded(self) -> tuple[bytes | str, ...]:
        """Contents or path of each file."""
        return tuple(file if isinstance(file, bytes | str) else _encoded(file) for file in self.files)


def source_of(kind: str, value: Any, where: str) -> MediaSource:
    """The image or video that a value is.

    Raises:
        ValueError: it has an unknown form.
    """
    files = value
    if kind == "video":
        if isinstance(value, Mapping):
            files = value.get("video", value)
        files = list(files) if isinstance(files, list | tuple) else [files]
        if not files:
            raise ValueError(f"{where} has a video without frames")
    else:
        files = [value]
    return MediaSource(kind=kind, files=tuple(_file(file, kind, where) for file in files))


def _file(value: Any, kind: str, where: str) -> Any:
    """Contents, path or Pillow image of one file."""
    if isinstance(value, Mapping):
        given = [value[key] for key in ("bytes", "path", kind, "image") if value.get(key) is not None]
        value = given[0] if given else None
    if isinstance(value, bytes | bytearray):
        return bytes(value) if isinstance(value, bytearray) else value
    if isinstance(value, str):
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
