"""Images and videos in vLLM's processes, as patches that strop has made.

vLLM has a processor for each model, which reads pictures, makes patches of them, and puts tokens in their places.
Prompts of strop come with both, so the processor that stands here only says how large media may be. `load` puts it in
the place of vLLM's own; vLLM calls it in each of its processes (entry_points.txt beside this file).

It runs in vLLM's environment, where there is no strop.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.inputs import mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

VARIABLE = "STROP_PICTURES"
"""Of a model with media: the name of its class, and how many tokens the largest medium of each kind takes, or null."""
_NAMES = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
"""Kind of media -> arguments of the model for its patches and its grid."""


def load() -> None:
    """Have vLLM take media of the model as they come; nothing for a model of text alone."""
    if VARIABLE not in os.environ:
        return
    from vllm.model_executor.models.registry import ModelRegistry

    if importlib.util.find_spec("torchvision") is None:
        _without_torchvision()
    model_class = ModelRegistry.models.get(json.loads(os.environ[VARIABLE])["architecture"])
    if model_class is not None:  # else vLLM refuses the model
        register = MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=NoDummies)
        register(model_class.load_model_cls())


def _without_torchvision() -> None:
    """Let vLLM import its models of the Qwen-VL family where there is no torchvision, as beside its build for CPUs.

    They take a function that computes sizes from a module which resizes with torchvision; transformers has the same
    function beside its processor for Pillow. Here neither resizes anything.
    """
    package = "transformers.models.qwen2_vl"
    pillow = importlib.import_module(f"{package}.image_processing_pil_qwen2_vl")
    sys.modules.setdefault(f"{package}.image_processing_qwen2_vl", pillow)


class Info(BaseProcessingInfo):
    """Limits of media: their number in a prompt, and the size of each."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Any number of each kind."""
        return dict.fromkeys(self._sizes)

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """No medium takes more tokens than a sequence has."""
        longest = self.ctx.model_config.max_model_len
        return {kind: min(size or longest, longest) for kind, size in self._sizes.items()}

    @property
    def _sizes(self) -> dict[str, int | None]:
        sizes: dict[str, int | None] = json.loads(os.environ[VARIABLE])["most_tokens"]
        return sizes


class NoDummies(BaseDummyInputsBuilder[Info]):
    """The processor makes them itself."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """None."""
        return ""

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: object
    ) -> dict[str, Any]:
        """None."""
        return {}


class Processor(BaseMultiModalProcessor[Info]):
    """Reads nothing: media come as patches, with their places."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(
        self, mm_counts: Mapping[str, int], *, cache: object = None, scheduler_config: object = None
    ) -> Any:
        """Media of the largest size, by which vLLM measures the memory that it needs."""
        config = self.info.get_hf_config().vision_config
        side = int(config.spatial_merge_size)
        width = int(getattr(config, "in_channels", 3) * config.temporal_patch_size * config.patch_size**2)
        longest = self.info.ctx.model_config.max_model_len
        sizes = self.info.get_mm_max_tokens_per_item(longest, mm_counts)
        items = []
        for kind in mm_counts:
            high = math.isqrt(sizes[kind])
            grid = (1, high * side, sizes[kind] // high * side)
            patches = torch.zeros(math.prod(grid), width)
            medium = {"kind": kind, "grid": grid, "start": 0, "hash": kind, "seconds_per_patch": 1.0}
            items.append(({**medium, "places": [1] * (math.prod(grid) // side**2)}, patches))
        return _input([0] * longest, items)

    def _get_mm_fields_config(self, hf_inputs: object, hf_processor_mm_kwargs: object) -> Any:
        raise NotImplementedError("media come as patches")

    def _get_prompt_updates(
        self, mm_items: object, hf_processor_mm_kwargs: object, out_mm_kwargs: object
    ) -> Any:
        raise NotImplementedError("media come with their tokens")


def with_pictures(token_ids: list[int], media: Sequence[Mapping[str, Any]], digest: object) -> Any:
    """A prompt with media, as vLLM's core takes it.

    Args:
        token_ids: with the tokens that stand for them.
        media: as `strop.rollout.vllm.pictures` tells them; the memory stays mapped as long as the tensors are used.
        digest: `digest_tensor`.

    Raises:
        ValueError: what is in the memory is not what was announced.
    """
    return _input(token_ids, [(medium, _patches(medium, digest)) for medium in media])


def _patches(medium: Mapping[str, Any], digest: Any) -> torch.Tensor:
    with Path(medium["path"]).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), medium["num_bytes"], flags=mmap.MAP_PRIVATE)
    ((_, shape, dtype, offset, expected),) = medium["entries"]
    kind = getattr(torch, dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    patches = torch.frombuffer(mapped, dtype=torch.uint8)[offset : offset + size].view(kind).view(shape)
    if shape[0] != math.prod(medium["grid"]) or digest(patches) != expected:
        raise ValueError(f"an {medium['kind']} of {medium['grid']} patches did not arrive as it was sent")
    return patches


def _input(token_ids: list[int], media: Sequence[tuple[Mapping[str, Any], torch.Tensor]]) -> Any:
    items: dict[str, list[Any]] = {}
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[PlaceholderRange]] = {}
    for medium, patches in media:
        kind = medium["kind"]
        items.setdefault(kind, []).append(_item(medium, patches))
        hashes.setdefault(kind, []).append(medium["hash"])
        marks = torch.tensor(medium["places"], dtype=torch.bool)
        span = PlaceholderRange(
            offset=medium["start"], length=len(marks), is_embed=None if bool(marks.all()) else marks
        )
        places.setdefault(kind, []).append(span)
    return mm_input(token_ids, MultiModalKwargsItems(items), hashes, places)


def _item(medium: Mapping[str, Any], patches: torch.Tensor) -> Any:
    """Arguments of the model for one medium."""
    kind = medium["kind"]
    name, grid = _NAMES[kind]
    values = {name: patches, grid: torch.tensor([medium["grid"]])}
    fields = {
        name: MultiModalFieldConfig.flat_from_sizes(kind, torch.tensor([len(patches)])),
        grid: MultiModalFieldConfig.batched(kind, keep_on_cpu=True),
    }
    if kind == "video":
        values["second_per_grid_ts"] = torch.tensor([medium["seconds_per_patch"]])
        fields["second_per_grid_ts"] = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
    (item,) = MultiModalKwargsItems.from_hf_inputs(values, fields)[kind]
    return item
