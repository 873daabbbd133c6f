"""Videos as files: when their frames are shown, and the frames themselves.

PyAV (the libraries of FFmpeg) reads MP4, WebM, Matroska, AVI and others; animated GIF, WebP and PNG need Pillow
alone. This is the one module that imports PyAV.

How many frames there are and how long they last is read from every packet of the file and not from its head, which
may be silent (WebM) or wrong: frames per second are frames over the time from the first one to the end of the last.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.engines.multimodal.image_reader import timed_pictures, upright_pictures

INSTALL = "pip install 'strop[video]'"
_PICTURES = (b"GIF8", b"RIFF", b"\x89PNG", b"\xff\xd8\xff")
"""First bytes of files that Pillow reads; RIFF is WebP, or AVI (see `_is_picture`)."""
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,ogg,flv,asf,h264,hevc,ivf"
"""Forms of files that are read; lists of other files or of addresses are not among them."""
_MAX_KEPT = 4096


@dataclass(frozen=True, kw_only=True)
class Film:
    """Frames and times of a video file, without its pixels."""

    size: tuple[int, int]
    """Width and height in pixels, as shown."""
    times: tuple[float, ...] = field(repr=False)
    """When each frame is shown, in seconds after the first one."""
    fps: float
    """Frames per second, on the whole."""
    digest: str
    """Of the contents of the file."""


def read_film(file: bytes | str) -> Film:
    """Times of all frames and the size of the first one, which is decoded.

    Args:
        file: the contents of a file, or its path.

    Raises:
        ValueError: there is no such file, it is no video or a damaged one, or PyAV is not installed.
    """
    if isinstance(file, bytes):
        return _read(file)
    with _readable(file):
        state = Path(file).stat()
    return _read_kept(file, state.st_mtime_ns, state.st_size)


def read_frames(file: bytes | str, numbers: Sequence[int]) -> Tensor:
    """The frames of these numbers, which may repeat, in this order: [F, 3, H, W] uint8, red, green, blue.

    Raises:
        ValueError: the file cannot be decoded up to the last of them.
    """
    unread = set(numbers)
    frames: dict[int, NDArray[np.uint8]] = {}
    with _readable(file):
        for number, picture in enumerate(_pictures(file)):
            if number in unread:
                frames[number] = picture()
            if len(frames) == len(unread):
                break
    if missing := sorted(unread - set(frames)):
        raise ValueError(f"{_named(file)} cannot be decoded beyond frame {missing[0]}; it is damaged")
    if len({picture.shape for picture in frames.values()}) > 1:
        raise ValueError(f"{_named(file)} changes the size of its frames; make them equal")
    return torch.from_numpy(np.stack([frames[number] for number in numbers])).permute(0, 3, 1, 2)


@functools.lru_cache(maxsize=_MAX_KEPT)
def _read_kept(file: str, _changed: int, _size: int) -> Film:
    return _read(file)


def _read(file: bytes | str) -> Film:
    with _readable(file):
        times, end = _picture_times(file) if _is_picture(file) else _packet_times(file)
        first = next(_pictures(file), None)
        if first is None:
            raise ValueError(f"{_named(file)} has no frame that can be decoded")
        high, wide, _ = first().shape
    lasting = end - times[0]
    return Film(
        size=(wide, high),
        times=tuple(float(time - times[0]) for time in times),
        fps=float(len(times) / lasting) if lasting > 0 else 1.0,
        digest=digest_of(file),
    )


def digest_of(file: bytes | str) -> str:
    """Of the contents of a file; 32 hexadecimal digits."""
    if isinstance(file, bytes):
        return hashlib.blake2b(file, digest_size=16).hexdigest()
    with _readable(file), Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _packet_times(file: bytes | str) -> tuple[list[Fraction], Fraction]:
    """When each frame is shown, ascending, and when the last one ends; nothing is decoded."""
    with _opened(file) as (container, stream):
        base: Fraction = stream.time_base
        frames = [
            (packet.pts, packet.duration or 0, packet.is_corrupt)
            for packet in container.demux(stream)
            if packet.size and not packet.is_discard
        ]
        if not frames:
            raise ValueError(f"{_named(file)} has a video stream without frames")
        if any(time is None for time, _, _ in frames):
            raise ValueError(f"{_named(file)} does not say when its frames are shown; convert it to MP4")
        last, lasting, _ = max(frames)
        end = last * base + (lasting * base or 1 / Fraction(stream.average_rate or 24))
        if any(corrupt for _, _, corrupt in frames) or _is_short(container, stream, len(frames), end):
            raise ValueError(
                f"{_named(file)} is cut off or damaged: {len(frames)} frames are there, up to {float(end):.1f} s, and "
                f"its head announces more"
            )
        return sorted(time * base for time, _, _ in frames), end


def _is_short(container: Any, stream: Any, num_frames: int, end: Fraction) -> bool:
    """Fewer frames than the head of the file says (MP4), or less time (Matroska, WebM), sound left aside."""
    if "matroska" in container.format.name and len(container.streams) == 1 and container.duration:
        return bool(end < Fraction(container.duration, 1_000_000) * Fraction(9, 10) - Fraction(1, 10))
    return bool(num_frames < stream.frames)


def _picture_times(file: bytes | str) -> tuple[list[Fraction], Fraction]:
    times, end = [], Fraction(0)
    for lasting in timed_pictures(file):
        times.append(end)
        end += Fraction(lasting, 1000)
    return times, end


def _pictures(file: bytes | str) -> Iterator[Any]:
    """For each frame in the order of showing, what makes its pixels [H, W, 3]."""
    if _is_picture(file):
        for picture in upright_pictures(file, every=True):
            yield functools.partial(np.asarray, picture)
        return
    with _opened(file) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if frame.is_corrupt:
                raise ValueError(f"{_named(file)} is damaged at frame {number}")
            yield functools.partial(_upright, frame)


def _upright(frame: Any) -> NDArray[np.uint8]:
    """Pixels of a frame, turned as the file says that it is shown."""
    pixels: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))


@contextlib.contextmanager
def _opened(file: bytes | str) -> Iterator[tuple[Any, Any]]:
    """The file and its video stream."""
    try:
        import av
    except ImportError as error:
        raise ValueError(
            f"{_named(file)} is a video, which needs PyAV; install it with: {INSTALL}"
        ) from error
    try:
        with (
            io.BytesIO(file) if isinstance(file, bytes) else Path(file).open("rb") as source,
            av.open(source, options={"format_whitelist": _FORMATS}) as container,
        ):
            if not container.streams.video:
                raise ValueError(f"{_named(file)} has no pictures; a video needs some")
            yield container, container.streams.video[0]
    except av.FFmpegError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"{_named(file)} cannot be decoded as a video ({reason}); convert it to MP4 or WebM"
        ) from error


@contextlib.contextmanager
def _readable(file: bytes | str) -> Iterator[None]:
    """Errors of a file that is not there, or may not be read, as sentences."""
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(
            f"{_named(file)} does not exist; paths in rows start at the current directory"
        ) from error
    except OSError as error:
        raise ValueError(f"{_named(file)} cannot be read: {error.strerror}") from error


def _is_picture(file: bytes | str) -> bool:
    """True where Pillow reads it."""
    if isinstance(file, bytes):
        head = file[:12]
    else:
        with Path(file).open("rb") as opened:
            head = opened.read(12)
    return head.startswith(_PICTURES) and not (head.startswith(b"RIFF") and head[8:] != b"WEBP")


def _named(file: bytes | str) -> str:
    return f"the file {file!r}" if isinstance(file, str) else f"a video of {len(file)} bytes"
