"""Inputs of a vision-language model beside token ids, as far as all families have them in common.

The model's own functions are called, so each architecture of transformers brings its formulas: a forward pass that puts
the vision tower's output in the places of the media tokens. Packed sequences give that pass the pictures of all prompts
in the order of their tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.engines.multimodal.pixels import MediaProcessor
from strop.engines.multimodal.placeholders import ToolImages
from strop.engines.segments import Span
from strop.protocol.trajectory import Media
from strop.utils.device import sent


class Reader:
    """Pictures in token ids, and their pixels, without a model."""

    def __init__(
        self, processor: MediaProcessor | None, token_ids: Mapping[str, int], *, tells_seconds: bool = False
    ) -> None:
        """Args:
        processor: that of the model folder; without one it takes text alone.
        token_ids: kind of media -> id of its token.
        tells_seconds: positions tell how much time lies between the patches of a video.
        """
        self.processor, self.token_ids, self.tells_seconds = processor, token_ids, tells_seconds

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Number of placeholder tokens of a picture of this grid."""
        return self._known().num_tokens(grid)

    def check(self, token_ids: Sequence[int], media: Sequence[Media], where: str) -> None:
        """Refuse media tokens without media, or the other way round.

        Raises:
            ValueError: they do not fit.
        """
        for kind, token in self.token_ids.items():
            num_expected = sum(self.num_tokens(medium.grid) for medium in media if medium.kind == kind)
            num_found = token_ids.count(token)
            if num_expected != num_found:
                raise ValueError(
                    f"{where} has {num_found} tokens that stand for parts of {kind}s, but its {kind}s take "
                    f"{num_expected}; prompts with media come from strop.data, and agents append to them "
                    f"without changing them"
                )

    def pixels(self, medium: Media) -> Tensor:
        """Pixels float32 of an image or a video, as the vision tower takes them.

        Raises:
            ValueError: a file cannot be read, or the model folder has no image processor.
        """
        return self._known().pixels(medium)

    def most_tokens(self, kind: str) -> int | None:
        """Number of tokens of the largest image; None: any number, and for videos."""
        return None if self.processor is None or kind != "image" else self.processor.most_tokens

    def image_encoder(self) -> ToolImages | None:
        """Images of tools, where the model folder has an image processor."""
        return None if self.processor is None else ToolImages(self.processor)

    def _known(self) -> MediaProcessor:
        if self.processor is None:
            raise ValueError(
                "a prompt has images, but the model folder has no image processor: copy preprocessor_config.json into "
                "it"
            )
        return self.processor


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An image whose pixels differ, as arguments of a model."""

    num_tokens: int
    arguments: Mapping[str, Tensor]


class Vision(Reader, ABC):
    """The vision side of one model; a subclass for each way to read pictures."""

    hidden: Callable[..., Any] | None = None
    """Called as the model's base is, with media among its arguments, for a model whose base does not take them."""
    tower: nn.Module | None

    def __init__(
        self,
        module: Any,
        processor: MediaProcessor | None,
        token_ids: Mapping[str, int],
        tower: nn.Module | None,
    ) -> None:
        """Args:
        module: a Hugging Face model.
        processor: that of its folder; without one it takes text alone.
        token_ids: kind of media -> id of its token.
        tower: the part of the model that reads pictures.
        """
        super().__init__(processor, token_ids)
        self.module, self.tower = module, tower
        self.text_id = min(set(range(len(token_ids) + 1)) - set(token_ids.values()))
        """The first token that stands for no media."""

    @abstractmethod
    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Number of placeholder tokens of a picture of this grid."""

    def positions(self, token_ids: Tensor, media: Sequence[Media]) -> Tensor:
        """Positions [n] or [3, n] of tokens [n] with media, on the CPU; those of text, unless a family has others."""
        return torch.arange(len(token_ids))

    @abstractmethod
    def arguments_of(self, kind: str, chosen: Sequence[Media], pixels: Tensor) -> Mapping[str, Tensor]:
        """Media of one kind, whose pixels are joined along the first axis, as arguments of the forward pass."""

    @abstractmethod
    def features_of_nothing(self, device: torch.device) -> Sequence[Tensor]:
        """Features of one small image of zeros, through every weight of the tower that an image goes through."""

    @abstractmethod
    def trials(self, device: torch.device) -> Sequence[Trial]:
        """Images of different shapes on which a loaded model is tried."""

    def trial_positions(self, token_ids: Tensor, arguments: Mapping[str, Tensor]) -> Tensor:
        """Positions [n] or [3, n] of tokens [n] with the image of a trial."""
        return self.positions(token_ids, ())

    def own_arguments(self, token_ids: Tensor) -> Mapping[str, Tensor]:
        """Arguments of the model's own forward pass for tokens [n], beside their ids and the pixels."""
        return {}

    def blocks(self, token_ids: Tensor) -> tuple[Span, ...]:
        """Runs of tokens that see each other whatever their order; none, unless a family has them."""
        return ()

    def arguments(self, media: Sequence[Media], *, device: torch.device) -> Mapping[str, Tensor]:
        """These media as arguments of the forward pass.

        Raises:
            ValueError: a file cannot be read, or the model folder has no image processor.
        """
        arguments: dict[str, Tensor] = {}
        for kind in self.token_ids:
            chosen = [medium for medium in media if medium.kind == kind]
            if chosen:
                pixels = sent(torch.cat([self.pixels(medium) for medium in chosen]), device)
                arguments |= self.arguments_of(kind, chosen, pixels)
        return arguments

    def touched(self, hidden: Tensor) -> Tensor:
        """`hidden`, with a gradient of 0 for every weight of the vision tower that is trained.

        Ranks add their gradients up together, so a rank whose prompts have no image takes part as well.
        """
        if (
            self.tower is None
            or not torch.is_grad_enabled()
            or not any(p.requires_grad for p in self.tower.parameters())
        ):
            return hidden
        features = self.features_of_nothing(hidden.device)
        return hidden + torch.stack([0.0 * part.sum() for part in features]).sum().to(hidden.dtype)

    def attention(self, name: str, *, by_formula: bool) -> dict[str, str]:
        """Attention of this name in the language part; the vision tower, not causal, has one of transformers."""
        config = self.module.config
        parts = dict.fromkeys(config.sub_configs, name)
        parts["vision_config"] = "eager" if by_formula else config.vision_config._attn_implementation
        return {"": name, **parts}

    def save_settings(self, folder: Path) -> None:
        """Copy the settings of the image processor into another model folder."""
        if self.processor is not None:
            self.processor.save(folder)
