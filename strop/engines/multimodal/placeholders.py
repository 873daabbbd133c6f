"""Images and videos in token ids: as many tokens as stand for each, with the image processor of a model folder."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from strop.engines.multimodal.pixels import MediaProcessor, film_key
from strop.engines.multimodal.sources import MediaSource, source_of
from strop.engines.multimodal.video_reader import Film, read_film, read_frames
from strop.protocol.trajectory import Media, MediaTokens

_RESULT = "the result of a tool"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An image or a video, and how large it is in pixels, patches and tokens."""

    source: MediaSource
    size: tuple[int, int]
    grid: tuple[int, int, int]
    token_ids: tuple[int, ...] = field(repr=False)
    """Token ids of it in a prompt, in place of the one token that the chat template writes."""
    first: int = 0
    """Index of the first token for its patches among these."""
    frames: tuple[int, ...] = ()
    times: tuple[float, ...] = ()
    seconds_per_patch: float = 1.0
    digest: str = ""
    """Of the contents of a video in one file."""
    uneven: str = ""
    """About frames of a video that are shown at other times than their numbers tell."""

    @property
    def kind(self) -> str:
        """`image` or `video`."""
        return self.source.kind

    @property
    def num_tokens(self) -> int:
        """Tokens that stand for it."""
        return len(self.token_ids)

    def at(self, start: int) -> Media:
        """Media of token ids in which its tokens begin at `start`."""
        parts = self.source.encoded()
        return Media(
            kind=self.kind,
            parts=parts,
            size=self.size,
            grid=self.grid,
            start=start,
            num_tokens=self.num_tokens,
            key=film_key(self.digest, self.frames) if self.frames else _key(parts),
            frames=self.frames,
            times=self.times,
            seconds_per_patch=self.seconds_per_patch,
        )


class RowMedia:
    """The media of a row, counted in tokens."""

    def __init__(self, processor: MediaProcessor, media: Sequence[Measured], where: str) -> None:
        self._processor, self._media, self._where = processor, media, where

    @property
    def films(self) -> list[str]:
        """Digests of its videos in files, and of which frames are taken."""
        return [film_key(medium.digest, medium.frames) for medium in self._media if medium.frames]

    @property
    def notes(self) -> list[str]:
        """Videos whose frames are shown at uneven distances, so that their numbers do not tell when."""
        return [medium.uneven for medium in self._media if medium.uneven]

    def expand(self, token_ids: Sequence[int]) -> array[int]:
        """The ids with as many tokens for each medium as stand for it."""
        placed = [(medium.kind, medium.token_ids) for medium in self._media]
        return _expanded(self._processor, token_ids, placed, self._where)

    def read(self) -> None:
        """Decode the videos in files up to the last frame that is taken."""
        for medium in self._media:
            if medium.frames:
                try:
                    read_frames(medium.source.files[0], medium.frames)
                except ValueError as error:
                    raise ValueError(f"{self._where}: {error}") from error

    def spans(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """[start, end) of each medium with the tokens that open and close it."""
        borders = self._processor.border_ids
        spans = []
        for start, medium in zip(_starts(self._processor, token_ids, self._media), self._media, strict=True):
            end = start + medium.num_tokens
            opens = start > 0 and token_ids[start - 1] in borders
            closes = end < len(token_ids) and token_ids[end] in borders
            spans.append((start - opens, end + closes))
        return spans

    def media(self, token_ids: Sequence[int]) -> tuple[Media, ...]:
        """Media of a prompt of these ids."""
        starts = _starts(self._processor, token_ids, self._media)
        return tuple(medium.at(start) for medium, start in zip(self._media, starts, strict=True))


def measured_media(
    processor: MediaProcessor,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[MediaSource],
    where: str,
) -> RowMedia:
    """The media of a row, counted in tokens.

    Raises:
        ValueError: the model takes no such media, or a file cannot be read.
    """

    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]

    return RowMedia(processor, [_measured(processor, source, where, encode) for source in sources], where)


class ToolImages:
    """Images that tools return, for one model (`strop.agents.tools.images.ImageEncoder`)."""

    def __init__(self, processor: MediaProcessor) -> None:
        self._processor = processor

    @property
    def token_id(self) -> int:
        """The token that stands for a part of an image."""
        return self._processor.token_ids["image"]

    @property
    def placeholder_id(self) -> int:
        """The token that the chat template writes for an image."""
        return self._processor.placeholder_ids["image"]

    def read(self, image: object) -> Media:
        """Contents and number of tokens of an image, which is decoded here: what an engine is given can be read.

        Args:
            image: encoded bytes, a Pillow image, or the path of a file, whose contents are taken now.

        Raises:
            ValueError: it cannot be read, or is none that the model can be shown.
        """
        source = source_of("image", image, _RESULT)
        if isinstance(source.files[0], str):
            source = MediaSource(kind="image", files=(_contents(source.files[0]),))
        media = _measured_image(self._processor, source, _RESULT).at(0)
        self._processor.pixels(media)
        return media

    def expand(self, token_ids: Sequence[int], images: Sequence[Media]) -> MediaTokens:
        """The ids with as many tokens for each image as stand for it, carrying the images.

        Raises:
            ValueError: there are not as many places for images as images.
        """
        placed = [(image.kind, self._processor.image_ids(image.grid)) for image in images]
        return self.place(_expanded(self._processor, token_ids, placed, _RESULT).tolist(), images)

    def place(self, token_ids: Sequence[int], images: Sequence[Media]) -> MediaTokens:
        """Ids in which tokens stand for the images already, carrying the images.

        Raises:
            ValueError: they have another number of tokens of images than these images take.
        """
        num_found = token_ids.count(self.token_id)
        num_expected = sum(self._processor.num_tokens(image.grid) for image in images)
        if num_found != num_expected:
            raise ValueError(
                f"{num_found} token ids stand for parts of images, but {len(images)} images take {num_expected}; give "
                f"every image so far, in order, and the ids as they were made with them"
            )
        starts = _starts(self._processor, token_ids, images)
        moved = [dataclasses.replace(image, start=start) for image, start in zip(images, starts, strict=True)]
        return MediaTokens(token_ids, moved)


def _measured(
    processor: MediaProcessor, source: MediaSource, where: str, encode: Callable[[str], list[int]]
) -> Measured:
    kind = source.kind
    if kind not in processor.token_ids or (kind == "video" and processor.video is None):
        raise ValueError(f"{where} has {kind}s, which this model is not given here; use images")
    if kind == "image":
        return _measured_image(processor, source, where)
    try:
        return _measured_video(processor, source, encode)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _measured_image(processor: MediaProcessor, source: MediaSource, where: str) -> Measured:
    try:
        size, _ = source.measure()
        grid = processor.grid("image", size)
        ids = processor.image_ids(grid)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Measured(source=source, size=size, grid=grid, token_ids=ids, first=_first_part(processor, ids))


def _first_part(processor: MediaProcessor, token_ids: Sequence[int]) -> int:
    """Index of the first token for a part of an image among those that stand for it."""
    return token_ids.index(processor.token_ids["image"])


def _measured_video(
    processor: MediaProcessor, source: MediaSource, encode: Callable[[str], list[int]]
) -> Measured:
    settings = processor.video
    assert settings is not None, "the model takes videos"
    film = read_film(source.files[0]) if source.is_film else None
    if film is not None:
        size, count, fps = film.size, len(film.times), film.fps
        frames = settings.frames(count, fps, source.sampling)
    else:
        (size, count), fps = source.measure(), source.frame_rate
        frames = settings.given_frames(count)
    grid = processor.grid("video", size, len(frames))
    pads = [processor.token_ids["video"]] * (processor.num_tokens(grid) // grid[0])
    ids, first = pads * grid[0], 0
    if settings.has_stamps:
        start, end = processor.around_step
        stamps = [encode(f"<{time:.1f} seconds>") for time in settings.stamps(frames, fps)]
        pieces = [[*stamp, start, *pads, end] for stamp in stamps]
        ids, first = [token for piece in pieces for token in piece], pieces[0].index(pads[0])
    return Measured(
        source=source,
        size=size,
        grid=grid,
        token_ids=tuple(ids),
        first=first,
        frames=() if film is None else tuple(frames),
        times=() if film is None else tuple(film.times[number] for number in frames),
        seconds_per_patch=settings.seconds_per_patch(len(frames), count, fps),
        digest="" if film is None else film.digest,
        uneven="" if film is None else _uneven(film, frames),
    )


def _uneven(film: Film, frames: Sequence[int]) -> str:
    """Description of a frame that is shown more than a frame's time off what its number says; empty where none is."""
    worst = max(frames, key=lambda number: abs(film.times[number] - number / film.fps))
    expected_s = worst / film.fps
    if abs(film.times[worst] - expected_s) <= 1 / film.fps:
        return ""
    return (
        f"frames of a video are shown at uneven distances: frame {worst} at {film.times[worst]:.2f} s, and by its "
        f"number at {expected_s:.2f} s, which is what models are told"
    )


def _key(parts: Sequence[bytes | str]) -> str:
    """Equal for equal contents, and for a path as long as its file does not change."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, str):
            state.update(f"{part} {Path(part).stat().st_mtime_ns}".encode())
        else:
            state.update(hashlib.blake2b(part).digest())
    return state.hexdigest()


def _expanded(
    processor: MediaProcessor,
    token_ids: Sequence[int],
    placed: Sequence[tuple[str, Sequence[int]]],
    where: str,
) -> array[int]:
    """The ids with what stands for each medium (its kind, and its tokens), where the template put one token."""
    kinds = {token: kind for kind, token in processor.placeholder_ids.items()}
    strange = set(processor.token_ids.values()) - kinds.keys()
    rest = iter(placed)
    expanded, present = array("i"), []
    try:
        for position, token in enumerate(token_ids):
            if token not in kinds:
                expanded.append(token)
                continue
            processor.check_around(token_ids[:position], token_ids[position + 1 :])
            present.append(kinds[token])
            _, ids = next(rest, ("", (token,)))
            expanded.extend(ids)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    expected = [kind for kind, _ in placed]
    if present != expected or not strange.isdisjoint(token_ids):
        raise ValueError(
            f"{where}: the chat template makes {_counted(present)} of {_counted(expected)}; use a "
            f"template for images, and write no control tokens into messages"
        )
    return expanded


def _starts(
    processor: MediaProcessor, token_ids: Sequence[int], media: Sequence[Measured | Media]
) -> list[int]:
    """Index of the first token of each medium."""
    at, starts, ids = 0, [], array("i", token_ids)
    for medium in media:
        if isinstance(medium, Measured):
            first = medium.first
        else:
            first = _first_part(processor, processor.image_ids(medium.grid))
        at = ids.index(processor.token_ids[medium.kind], at) - first
        starts.append(at)
        at += medium.num_tokens
    return starts


def _counted(kinds: Sequence[str]) -> str:
    if not kinds:
        return "no media"
    return " and ".join(f"{kinds.count(kind)} {kind}s" for kind in sorted(set(kinds)))


def _contents(path: str) -> bytes:
    try:
        if not Path(path).is_file():  # no device or pipe, which may not end
            raise ValueError(f"{_RESULT}: there is no file {path!r}")
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{_RESULT}: the file {path!r} cannot be read: {error.strerror}") from error
