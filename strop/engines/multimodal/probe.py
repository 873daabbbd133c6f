"""A vision-language model on packed prompts with images, compared with its own forward pass on each alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from strop.engines.attention import PackedAttention
from strop.engines.causal_lm import CausalLM
from strop.engines.multimodal.vl_model import Vision
from strop.engines.packing import joined_positions
from strop.engines.segments import Segment


class MediaProbe:
    """Prompts with an image each, and what the model makes of them with its own attention."""

    @torch.no_grad()
    def __init__(self, module: Any, vision: Vision, device: torch.device) -> None:
        """Run the module alone; before it gets packed attention.

        Args:
            module: a model that takes images.
            vision: its vision side.
            device: where it is.
        """
        self._vision = vision
        image = vision.token_ids["image"]
        text = [token for token in range(8) if token not in vision.token_ids.values()][:4]
        self._prompts, self._positions, self._pictures, references = [], [], [], []
        for number, trial in enumerate(vision.trials(device)):
            ids = torch.tensor([*text[number:], *[image] * trial.num_tokens, *text], device=device)
            dtype = next(module.parameters()).dtype
            arguments = {
                name: value.to(dtype) if value.is_floating_point() else value
                for name, value in trial.arguments.items()
            }
            output = module(input_ids=ids[None], use_cache=False, **vision.own_arguments(ids), **arguments)
            references.append(output.logits[0].float())
            self._prompts.append(ids)
            self._positions.append(vision.trial_positions(ids, arguments))
            self._pictures.append(arguments)
        self._own = torch.cat(references)

    @torch.no_grad()
    def difference(self, model: CausalLM) -> float:
        """Largest log-prob difference between packed prompts and each alone."""
        ends = torch.tensor([len(ids) for ids in self._prompts]).cumsum(0).tolist()
        segments = [
            Segment(start=end - len(ids), length=len(ids), blocks=self._vision.blocks(ids))
            for ids, end in zip(self._prompts, ends, strict=True)
        ]
        hidden = model.hidden(
            torch.cat(self._prompts)[None],
            joined_positions(self._positions).to(model.device),
            PackedAttention(segments, device=model.device),
            {name: torch.cat([picture[name] for picture in self._pictures]) for name in self._pictures[0]},
        )
        ours = dataclasses.replace(model.head, banned=None).logits(hidden).float()
        return float((ours.log_softmax(-1) - self._own.log_softmax(-1)).abs().max())
