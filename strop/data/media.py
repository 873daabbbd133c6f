"""Images and videos of rows: found in columns and messages, counted in tokens, put into prompts.

A row names its media in the columns `images` and `videos`, in the order of the placeholders `<image>` and
`<video>` inside its messages, or right in the parts of a message ({"type": "image", "image": ...}). Pixels are not
read here, only the head of each file: its size says how many tokens stand for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.engines.causal_lm import CausalLM
from strop.engines.vision_pixels import MediaProcessor, load_media_processor, picture_size
from strop.trajectory import Media, MediaTokens, Prompt

MEDIA_COLUMNS = {"image": "images", "video": "videos"}
"""Kind of media -> column of a row."""
MAX_FRAMES = 768
"""Most frames of a video, as in the processors of the Qwen models."""
_PLACEHOLDER = re.compile(r"<(image|video)>")
_RESULT = "the result of a tool"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class MediaSource:
    """An image or a video as a row gives it."""

    kind: str
    files: tuple[Any, ...]
    """Contents (bytes), path, or Pillow image: one for an image, one per frame for a video."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """How large a picture is, in pixels, patches and tokens."""

    kind: str
    size: tuple[int, int]
    grid: tuple[int, int, int]
    num_tokens: int


def has_media(source: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a row has a column of media, or a message with a part that is one."""
    if any(source.get(column) is not None for column in MEDIA_COLUMNS.values()):
        return True
    return any(part.get("type") in MEDIA_COLUMNS for message in messages for part in _parts(message))


def take_media(
    source: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], where: str
) -> tuple[tuple[dict[str, Any], ...], tuple[MediaSource, ...]]:
    """Messages as a chat template takes them, with parts {"type": "image"}, and the media in their order.

    Raises:
        ValueError: the numbers of placeholders and media differ, or a medium has an unknown form.
    """
    columns = {kind: _column(source.get(column), kind, where) for kind, column in MEDIA_COLUMNS.items()}
    asked = dict.fromkeys(columns, 0)
    found: list[MediaSource] = []
    placed = []
    for message in messages:
        parts = []
        for part in _with_placeholders(message):
            kind = part.get("type")
            if kind in MEDIA_COLUMNS:
                given = part.get(kind, part.get("path"))
                if given is None:
                    asked[kind] += 1
                    given = next(columns[kind].rest, None)
                if given is not None:
                    found.append(_source(kind, given, where))
                part = {"type": kind}
            parts.append(part)
        is_text = isinstance(message.get("content"), str) and not any(
            p["type"] in MEDIA_COLUMNS for p in parts
        )
        placed.append(dict(message) if is_text or "content" not in message else {**message, "content": parts})
    for kind, column in columns.items():
        if asked[kind] != column.count:
            raise ValueError(
                f"{where} has {asked[kind]} placeholders <{kind}> in its messages, but {column.count} {kind}s in "
                f"column {MEDIA_COLUMNS[kind]!r}; they must be as many, in the same order"
            )
    return tuple(placed), tuple(found)


def without_contents(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The messages as they stand in the row, but for pictures in their parts, which are only named."""
    plain = []
    for message in messages:
        if any(part.get("type") in MEDIA_COLUMNS for part in _parts(message)):
            parts = [{"type": p["type"]} if p.get("type") in MEDIA_COLUMNS else p for p in _parts(message)]
            plain.append({**message, "content": parts})
        else:
            plain.append(dict(message))
    return tuple(plain)


class MediaEncoder:
    """Puts the media of rows into their token ids, with the processor of the model that a tokenizer belongs to."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._folder = str(tokenizer.name_or_path)
        self._processor: MediaProcessor | None = None

    def require(self, where: str) -> None:
        """Refuse media where the model takes text alone.

        Raises:
            ValueError: there is no image processor beside the tokenizer.
        """
        try:
            self._processor = self.processor
        except ValueError as error:
            raise ValueError(f"{where} has images or videos, but {error}") from error

    def place(self, sources: Sequence[MediaSource], where: str) -> tuple[Placed, ...]:
        """Size, patches and tokens of each medium.

        Raises:
            ValueError: the model takes no such media, or a file cannot be read.
        """
        return tuple(self._placed(source, where) for source in sources)

    def expand(self, token_ids: Sequence[int], media: Sequence[Placed], where: str) -> array[int]:
        """The ids with as many tokens for each medium as stand for it, where the template put one.

        Raises:
            ValueError: the template puts other media, or another number of them.
        """
        kinds = {token: kind for kind, token in self.processor.token_ids.items()}
        rest = iter(media)
        expanded, found = array("i"), []
        for token in token_ids:
            if token not in kinds:
                expanded.append(token)
                continue
            found.append(kinds[token])
            placed = next(rest, None)
            expanded.extend([token] * (1 if placed is None else placed.num_tokens))
        if found != [placed.kind for placed in media]:
            raise ValueError(
                f"{where}: the chat template makes {_counted(found)} of {_counted([p.kind for p in media])}; use a "
                f"template for images, and write no control tokens into messages"
            )
        return expanded

    def starts(self, token_ids: Sequence[int], media: Sequence[Placed]) -> list[int]:
        """Where the tokens of each medium begin."""
        tokens, at, starts = self.processor.token_ids, 0, []
        ids = array("i", token_ids)
        for placed in media:
            at = ids.index(tokens[placed.kind], at)
            starts.append(at)
            at += placed.num_tokens
        return starts

    def spans(self, token_ids: Sequence[int], media: Sequence[Placed]) -> list[tuple[int, int]]:
        """[start, end) of each medium with the tokens that open and close it: what is never cut."""
        borders = self.processor.border_ids
        spans = []
        for start, placed in zip(self.starts(token_ids, media), media, strict=True):
            end = start + placed.num_tokens
            opens = start > 0 and token_ids[start - 1] in borders
            closes = end < len(token_ids) and token_ids[end] in borders
            spans.append((start - opens, end + closes))
        return spans

    def media(
        self, token_ids: Sequence[int], sources: Sequence[MediaSource], placed: Sequence[Placed]
    ) -> tuple[Media, ...]:
        """What a prompt carries."""
        return tuple(
            _media(source, one, start)
            for source, one, start in zip(sources, placed, self.starts(token_ids, placed), strict=True)
        )

    @property
    def processor(self) -> MediaProcessor:
        """The processor in the tokenizer's folder.

        Raises:
            ValueError: there is none.
        """
        if self._processor is None:
            self._processor = load_media_processor(self._folder)
        if self._processor is None:
            raise ValueError(
                f"the model {self._folder!r} takes text alone: use a vision-language model with its image processor "
                f"(preprocessor_config.json), or remove the columns of media"
            )
        return self._processor

    def _placed(self, source: MediaSource, where: str) -> Placed:
        kind, processor = source.kind, self.processor
        if kind not in processor.token_ids or (kind == "video" and not processor.takes_videos):
            raise ValueError(f"{where} has {kind}s, which this model is not given here; use images")
        try:
            sizes = [_size(file) for file in source.files]
            size = sizes[0][0]
            num_frames = sum(count for _, count in sizes)
            if any(other != size for other, _ in sizes):
                raise ValueError("the frames of a video have different sizes; make them equal")
            if kind == "video" and num_frames > MAX_FRAMES:
                raise ValueError(
                    f"a video has {num_frames} frames, over the limit of {MAX_FRAMES}; take fewer"
                )
            grid = processor.grid(kind, size, num_frames)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return Placed(kind=kind, size=size, grid=grid, num_tokens=processor.num_tokens(grid))


class ToolImages:
    """Images that tools return, for the model that a tokenizer belongs to."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._encoder = MediaEncoder(tokenizer)

    @property
    def token_id(self) -> int:
        """The token that stands for a part of an image."""
        return self._encoder.processor.token_ids["image"]

    def read(self, image: Any) -> Media:
        """Contents and number of tokens of an image, which is decoded here: what an engine is given can be read.

        Args:
            image: encoded bytes, a Pillow image, or the path of a file, whose contents are taken now.

        Raises:
            ValueError: it cannot be read, or is none that the model can be shown.
        """
        source = _source("image", image, _RESULT)
        if isinstance(source.files[0], str):
            source = MediaSource(kind="image", files=(_contents(source.files[0]),))
        (placed,) = self._encoder.place([source], _RESULT)
        media = _media(source, placed, 0)
        self._encoder.processor.patches(media)
        return media

    def expand(self, token_ids: Sequence[int], images: Sequence[Media]) -> MediaTokens:
        """The ids with as many tokens for each image as stand for it, carrying the images.

        Raises:
            ValueError: there are not as many places for images as images.
        """
        placed = [_placed_as(one) for one in images]
        return self.place(self._encoder.expand(token_ids, placed, _RESULT).tolist(), images)

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
        starts = self._encoder.starts(token_ids, [_placed_as(one) for one in images])
        moved = [dataclasses.replace(one, start=start) for one, start in zip(images, starts, strict=True)]
        return MediaTokens(token_ids, moved)


def tool_images(model: CausalLM, tokenizer: PreTrainedTokenizerBase) -> ToolImages | None:
    """What reads images of tools for a loaded model; None for one that takes text alone."""
    if model.vision is None or not model.vision.has_processor:
        return None
    return ToolImages(tokenizer)


def prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """The prompt as the model sees it, special tokens included, with `<image 448x448: 256 tokens>` for media."""
    placed = [_placed_as(one) for one in prompt.media]
    return shown_text(tokenizer, prompt.token_ids, placed, [one.start for one in prompt.media])


def _placed_as(media: Media) -> Placed:
    return Placed(kind=media.kind, size=media.size, grid=media.grid, num_tokens=media.num_tokens)


def shown_text(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    media: Sequence[Placed],
    starts: Sequence[int],
) -> str:
    """Decoded token ids, with one name in place of the tokens of each medium."""
    pieces, at = [], 0
    for placed, start in zip(media, starts, strict=True):
        wide, high = placed.size
        pieces.append(str(tokenizer.decode(list(token_ids[at:start]), skip_special_tokens=False)))
        pieces.append(f"<{placed.kind} {wide}x{high}: {placed.num_tokens} tokens>")
        at = start + placed.num_tokens
    pieces.append(str(tokenizer.decode(list(token_ids[at:]), skip_special_tokens=False)))
    return "".join(pieces)


@dataclass(kw_only=True)
class _Column:
    """What a column of media still has to give."""

    rest: Iterator[Any]
    count: int


def _column(value: Any, kind: str, where: str) -> _Column:
    if value is None:
        value = []
    if not isinstance(value, list | tuple):
        raise ValueError(
            f"{where}: column {MEDIA_COLUMNS[kind]!r} holds a {type(value).__name__}; it must be a list of {kind}s"
        )
    return _Column(rest=iter(value), count=len(value))


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of a structured content."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return []
    return [part for part in content if isinstance(part, Mapping)]


def _with_placeholders(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A message's content as parts, placeholders inside of texts being parts of their own."""
    content = message.get("content")
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else _parts(message)
    parts: list[Mapping[str, Any]] = []
    for part in texts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            parts.append(part)
            continue
        for number, piece in enumerate(_PLACEHOLDER.split(part["text"])):
            if number % 2:
                parts.append({"type": piece})
            elif piece or part["text"] == "":
                parts.append({**part, "text": piece})
    return parts


def _source(kind: str, value: Any, where: str) -> MediaSource:
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


def _contents(path: str) -> bytes:
    try:
        if not Path(path).is_file():  # no device or pipe, which may not end
            raise ValueError(f"{_RESULT}: there is no file {path!r}")
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{_RESULT}: the file {path!r} cannot be read: {error.strerror}") from error


def _size(file: Any) -> tuple[tuple[int, int], int]:
    """Width and height, and number of frames."""
    if isinstance(file, bytes | str):
        return picture_size(file)
    width, height = file.size
    return (int(width), int(height)), 1


def _media(source: MediaSource, placed: Placed, start: int) -> Media:
    parts = tuple(file if isinstance(file, bytes | str) else _encoded(file) for file in source.files)
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, str):
            state.update(f"{part} {Path(part).stat().st_mtime_ns}".encode())
        else:
            state.update(hashlib.blake2b(part).digest())
    return Media(
        kind=placed.kind,
        parts=parts,
        size=placed.size,
        grid=placed.grid,
        start=start,
        num_tokens=placed.num_tokens,
        key=state.hexdigest(),
    )


def _encoded(image: Any) -> bytes:
    """A Pillow image as a file, without loss."""
    file = io.BytesIO()
    image.convert("RGB").save(file, format="PNG")
    return file.getvalue()


def _counted(kinds: Sequence[str]) -> str:
    if not kinds:
        return "no media"
    return " and ".join(f"{kinds.count(kind)} {kind}s" for kind in sorted(set(kinds)))
