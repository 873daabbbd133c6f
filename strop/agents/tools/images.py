"""Images in results of tools: read once, put into token ids.

The encoder belongs to the model, so a worker sets it (`AgentSetup.images`); agents know its interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Protocol, TypeAlias

from strop.protocol.trajectory import Media, MediaTokens

if TYPE_CHECKING:
    from PIL.Image import Image

SHOWN_AS = "[image]"
"""Stands for an image where the conversation is read as text."""

ImageSource: TypeAlias = "bytes | str | PathLike[str] | Image"
"""Encoded bytes, the path of a file, or a Pillow image."""


class ImageEncoder(Protocol):
    """Encoder of images for one model."""

    @property
    def token_id(self) -> int:
        """The token that stands for a part of an image."""
        ...

    @property
    def placeholder_id(self) -> int:
        """The token that a chat template writes, once for each image."""
        ...

    def read(self, image: ImageSource) -> Media:
        """Contents and number of tokens of an image; its place is given by `expand`.

        Args:
            image: a file may be gone or changed afterwards.

        Raises:
            ValueError: it is no image that the model can be shown.
        """
        ...

    def expand(self, token_ids: Sequence[int], images: Sequence[Media]) -> MediaTokens:
        """The ids with as many tokens for each image as stand for it, carrying the images.

        Raises:
            ValueError: there are not as many places for images as images.
        """
        ...

    def place(self, token_ids: Sequence[int], images: Sequence[Media]) -> MediaTokens:
        """Ids that `expand` made, or parts of them put together, carrying the images again.

        Raises:
            ValueError: the ids have another number of tokens of images than these images take.
        """
        ...


def as_read(text: str, num_images: int) -> str:
    """A turn with images as text."""
    return "\n".join([*[SHOWN_AS] * num_images, *([text] if text else [])])
