"""Pictures in files, with Pillow: their sizes from the head of a file, and their pixels."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_ROTATED = frozenset({5, 6, 7, 8})
"""EXIF orientations that exchange width and height."""
_EXIF_ORIENTATION = 0x0112
_SHOWN = 200
"""Characters of a path that a sentence shows."""
_FRAME_MS = 100
"""Duration of a frame of an animated picture that names none, as in browsers."""


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


def upright_pictures(part: bytes | str, *, every: bool) -> list[Any]:
    """The picture of a file, upright and in red, green and blue; `every` frame of it, or the first.

    Raises:
        ValueError: there is no such file, or it is no picture.
    """

    def decode(image: Any) -> list[Any]:
        from PIL import ImageOps, ImageSequence

        frames = ImageSequence.Iterator(image) if every else [image]
        return [ImageOps.exif_transpose(frame).convert("RGB") for frame in frames]

    return _with_image(part, decode)


def timed_pictures(part: bytes | str) -> list[int]:
    """Duration of each frame of an animated picture, in milliseconds.

    Raises:
        ValueError: there is no such file, or it is no picture.
    """

    def measure(image: Any) -> list[int]:
        from PIL import ImageSequence

        lasting = []
        for frame in ImageSequence.Iterator(image):
            frame.load()  # WebP says it only then
            lasting.append(round(frame.info.get("duration") or _FRAME_MS))
        return lasting

    return _with_image(part, measure)


def shortened(path: str) -> str:
    """A path for a sentence; what is no path may be megabytes of base64."""
    return path if len(path) <= _SHOWN else f"{path[:_SHOWN]}…"


def _with_image(part: bytes | str, use: Callable[[Any], T]) -> T:
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(
            "rows with images need Pillow; install it with: pip install 'strop[vision]'"
        ) from error
    named = f"the file {shortened(part)!r}" if isinstance(part, str) else f"an image of {len(part)} bytes"
    try:
        with Image.open(io.BytesIO(part) if isinstance(part, bytes) else part) as image:
            return use(image)
    except FileNotFoundError as error:
        raise ValueError(f"{named} does not exist; paths in rows start at the current directory") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        text = getattr(error, "strerror", None) or str(error)  # of Pillow, with the object that was read
        reason = text.strip().split("\n")[0].split(" <_io")[0].split(" '")[0]
        raise ValueError(
            f"{named} cannot be read as a picture ({reason}); use PNG, JPEG, WebP or GIF"
        ) from error
