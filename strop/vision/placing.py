"""Images and videos in token ids: as many tokens as stand for each, with the image processor of a model folder."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.trajectory import Media, MediaTokens
from strop.vision.pixels import MediaProcessor, load_media_processor
from strop.vision.sources import MediaSource, source_of

MAX_FRAMES = 768
"""Most frames of a video, as in the processors of the Qwen models."""
_RESULT = "the result of a tool"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An image or a video, and how large it is in pixels, patches and tokens."""

    source: MediaSource
    size: tuple[int, int]
    grid: tuple[int, int, int]
    num_tokens: int

    @property
    def kind(self) -> str:
        """`image` or `video`."""
        return self.source.kind

    def at(self, start: int) -> Media:
        """What ids carry in which its tokens begin at `start`."""
        parts = self.source.encoded()
        state = hashlib.blake2b(digest_size=16)
        for part in parts:
            if isinstance(part, str):
                state.update(f"{part} {Path(part).stat().st_mtime_ns}".encode())
            else:
                state.update(hashlib.blake2b(part).digest())
        return Media(
            kind=self.kind,
            parts=parts,
            size=self.size,
            grid=self.grid,
            start=start,
            num_tokens=self.num_tokens,
            key=state.hexdigest(),
        )


class RowMedia:
    """The media of a row; see `strop.data.media.RowMedia`."""

    def __init__(self, processor: MediaProcessor, media: Sequence[Measured], where: str) -> None:
        self._processor, self._media, self._where = processor, media, where

    def expand(self, token_ids: Sequence[int]) -> array[int]:
        """The ids with as many tokens for each medium as stand for it."""
        return _expanded(self._processor, token_ids, self._media, self._where)

    def spans(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """[start, end) of each medium with the tokens that open and close it."""
        borders = self._processor.border_ids
        spans = []
        for start, one in zip(_starts(self._processor, token_ids, self._media), self._media, strict=True):
            end = start + one.num_tokens
            opens = start > 0 and token_ids[start - 1] in borders
            closes = end < len(token_ids) and token_ids[end] in borders
            spans.append((start - opens, end + closes))
        return spans

    def media(self, token_ids: Sequence[int]) -> tuple[Media, ...]:
        """What a prompt of these ids carries."""
        starts = _starts(self._processor, token_ids, self._media)
        return tuple(one.at(start) for one, start in zip(self._media, starts, strict=True))


def row_media(tokenizer: PreTrainedTokenizerBase, sources: Sequence[MediaSource], where: str) -> RowMedia:
    """The media of a row for the model that a tokenizer belongs to.

    Raises:
        ValueError: there is no image processor beside the tokenizer, the model takes no such media, or a file cannot
            be read.
    """
    folder = str(tokenizer.name_or_path)
    try:
        processor = load_media_processor(folder)
        if processor is None:
            raise ValueError(
                f"the model {folder!r} takes text alone: use a vision-language model with its image processor "
                f"(preprocessor_config.json), or remove the columns of media"
            )
    except ValueError as error:
        raise ValueError(f"{where} has images or videos, but {error}") from error
    return RowMedia(processor, [_measured(processor, source, where) for source in sources], where)


class ToolImages:
    """Images that tools return, for one model (`strop.agents.images.ImageEncoder`)."""

    def __init__(self, processor: MediaProcessor) -> None:
        self._processor = processor

    @property
    def token_id(self) -> int:
        """The token that stands for a part of an image."""
        return self._processor.token_ids["image"]

    def read(self, image: Any) -> Media:
        """Contents and number of tokens of an image, which is decoded here: what an engine is given can be read.

        Args:
            image: encoded bytes, a Pillow image, or the path of a file, whose contents are taken now.

        Raises:
            ValueError: it cannot be read, or is none that the model can be shown.
        """
        source = source_of("image", image, _RESULT)
        if isinstance(source.files[0], str):
            source = MediaSource(kind="image", files=(_contents(source.files[0]),))
        media = _measured(self._processor, source, _RESULT).at(0)
        self._processor.patches(media)
        return media

    def expand(self, token_ids: Sequence[int], images: Sequence[Media]) -> MediaTokens:
        """The ids with as many tokens for each image as stand for it, carrying the images.

        Raises:
            ValueError: there are not as many places for images as images.
        """
        return self.place(_expanded(self._processor, token_ids, images, _RESULT).tolist(), images)

    def place(self, token_ids: Sequence[int], images: Sequence[Media]) -> MediaTokens:
        """Ids in which tokens stand for the images already, carrying the images.

        Raises:
            ValueError: they have another number of tokens of images than these images take.
        """
        found, taken = token_ids.count(self.token_id), sum(one.num_tokens for one in images)
        if found != taken:
            raise ValueError(
                f"{found} token ids stand for parts of images, but {len(images)} images take {taken}; give every image "
                f"so far, in order, and the ids as they were made with them"
            )
        starts = _starts(self._processor, token_ids, images)
        moved = [dataclasses.replace(one, start=start) for one, start in zip(images, starts, strict=True)]
        return MediaTokens(token_ids, moved)


def _measured(processor: MediaProcessor, source: MediaSource, where: str) -> Measured:
    kind = source.kind
    if kind not in processor.token_ids or (kind == "video" and not processor.takes_videos):
        raise ValueError(f"{where} has {kind}s, which this model is not given here; use images")
    try:
        size, num_frames = source.measure()
        if kind == "video" and num_frames > MAX_FRAMES:
            raise ValueError(f"a video has {num_frames} frames, over the limit of {MAX_FRAMES}; take fewer")
        grid = processor.grid(kind, size, num_frames)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Measured(source=source, size=size, grid=grid, num_tokens=processor.num_tokens(grid))


def _expanded(
    processor: MediaProcessor, token_ids: Sequence[int], media: Sequence[Measured | Media], where: str
) -> array[int]:
    """The ids with as many tokens for each medium as stand for it, where the template put one."""
    kinds = {token: kind for kind, token in processor.token_ids.items()}
    rest = iter(media)
    expanded, found = array("i"), []
    for token in token_ids:
        if token not in kinds:
            expanded.append(token)
            continue
        found.append(kinds[token])
        one = next(rest, None)
        expanded.extend([token] * (1 if one is None else one.num_tokens))
    if found != [one.kind for one in media]:
        raise ValueError(
            f"{where}: the chat template makes {_counted(found)} of {_counted([one.kind for one in media])}; use a "
            f"template for images, and write no control tokens into messages"
        )
    return expanded


def _starts(
    processor: MediaProcessor, token_ids: Sequence[int], media: Sequence[Measured | Media]
) -> list[int]:
    """Where the tokens of each medium begin."""
    at, starts, ids = 0, [], array("i", token_ids)
    for one in media:
        at = ids.index(processor.token_ids[one.kind], at)
        starts.append(at)
        at += one.num_tokens
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
