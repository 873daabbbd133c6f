"""A vision-language model on packed prompts with images, compared with its own forward pass on each alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from strop.engines.attention import PackedAttention, Segment
from strop.engines.causal_lm import CausalLM

GRIDS = ((1, 2), (3, 2))
"""Height and width in tokens of the image of each prompt: different, so that exchanged positions show."""


class MediaProbe:
    """Prompts with an image each, and what the model makes of them with its own attention."""

    @torch.no_grad()
    def __init__(self, module: Any, token_ids: Mapping[str, int], device: torch.device) -> None:
        """Run the module alone; before it gets packed attention.

        Args:
            module: a model that takes images.
            token_ids: kind of media -> id of its token.
            device: where it is.
        """
        image = token_ids["image"]
        text = [token for token in range(8) if token not in token_ids.values()][:4]
        self._prompts, self._positions, self._pictures, own = [], [], [], []
        for number, grid in enumerate(GRIDS):
            ids = torch.tensor([*text[number:], *[image] * (grid[0] * grid[1]), *text], device=device)
            types = (ids == image).int()[None]
            arguments = self._picture(module, grid, float(number), device)
            output = module(input_ids=ids[None], mm_token_type_ids=types, use_cache=False, **arguments)
            own.append(output.logits[0].float())
            placed, _ = module.base_model.get_rope_index(
                ids[None], mm_token_type_ids=types, image_grid_thw=arguments["image_grid_thw"]
            )
            self._prompts.append(ids)
            self._positions.append(placed)
            self._pictures.append(arguments)
        self._own = torch.cat(own)

    @torch.no_grad()
    def difference(self, model: CausalLM) -> float:
        """Largest log-prob difference between packed prompts and each alone."""
        ends = torch.tensor([len(ids) for ids in self._prompts]).cumsum(0).tolist()
        segments = [
            Segment(start=end - len(ids), length=len(ids))
            for ids, end in zip(self._prompts, ends, strict=True)
        ]
        hidden = model.hidden(
            torch.cat(self._prompts)[None],
            torch.cat(self._positions, dim=2),
            PackedAttention(segments, device=model.device),
            {name: torch.cat([one[name] for one in self._pictures]) for name in self._pictures[0]},
        )
        ours = dataclasses.replace(model.head, banned=None).logits(hidden).float()
        return float((ours.log_softmax(-1) - self._own.log_softmax(-1)).abs().max())

    def _picture(
        self, module: Any, grid: tuple[int, int], shade: float, device: torch.device
    ) -> dict[str, Tensor]:
        """An image whose patches differ, as arguments of the model."""
        vision = module.config.vision_config
        merge = int(vision.spatial_merge_size)
        width = int(vision.temporal_patch_size * vision.patch_size**2)
        width *= int(getattr(vision, "in_channels", 3))
        count = grid[0] * grid[1] * merge**2
        values = torch.linspace(-1.0, 1.0 + shade, count * width, device=device).view(count, width)
        sizes = torch.tensor([[1, grid[0] * merge, grid[1] * merge]], device=device)
        return {"pixel_values": values.to(next(module.parameters()).dtype), "image_grid_thw": sizes}
