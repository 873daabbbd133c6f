"""Video files with known time stamps, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

EVEN = tuple(range(0, 1200, 100))
"""Milliseconds: 12 frames, 10 a second."""
UNEVEN = (0, 100, 200, 700, 800, 900, 1500, 1600, 2500)
"""9 frames in 2.6 s, as the last one lasts 0.1 s."""


def shade(number: int, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Frame `number`: a different grey for each, with a red half and a slope, so that resizing and turning show."""
    width, height = size
    pixels = np.full((height, width, 3), (number * 20) % 256, np.uint8)
    pixels[:, : width // 2, 0] = 200
    pixels[:, :, 2] = np.linspace(0, 255, height).astype(np.uint8)[:, None]
    return pixels


def write_video(
    path: Path, stamps: Sequence[int], *, codec: str = "mpeg4", size: tuple[int, int] = (48, 32)
) -> Path:
    """A video whose frames are shown at these milliseconds; the form of the file follows from the name."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(10))
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        if codec == "libx264":
            stream.options = {"bf": "2"}
        for number, stamp in enumerate(stamps):
            frame = av.VideoFrame.from_ndarray(shade(number, size), format="rgb24")
            frame.pts, frame.time_base = stamp, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
