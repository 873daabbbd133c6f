"""Images and videos for vLLM: as the patches that the trainer's model gets, through shared memory.

vLLM would read and resize pictures itself, with a processor of another version, and put tokens in their places. Here
the ids that were sampled from are the ids that are trained on, so both are given: token ids as strop placed them, and
patches as strop made them. A picture is known to vLLM by a hash of its patches, which keys what it computed before.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.engines.multimodal.vl_model import Reader
from strop.protocol.trajectory import Media
from strop.rollout.weight_sync.bucket import shared_bucket


@dataclass
class _Shared:
    """Patches in memory that vLLM's process reads, and how many requests need them."""

    memory: contextlib.ExitStack
    bucket: dict[str, Any]
    hash: str
    num_users: int = 0


class SharedPictures:
    """The patches of the running requests' media, each once, however many requests have it.

    A medium takes no more tokens than its prompt may have, so those of a request are bounded by its tokens.
    """

    def __init__(self, reader: Reader | None) -> None:
        """Args:
        reader: makes patches; None where there are never any media.
        """
        self._reader = reader
        self._shared: dict[tuple[str, str, tuple[int, int, int]], _Shared] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that is shared now."""
        return sum(picture.bucket["num_bytes"] for picture in self._shared.values())

    @contextlib.contextmanager
    def of(self, token_ids: Sequence[int], media: Sequence[Media]) -> Iterator[list[dict[str, Any]]]:
        """Reference by which vLLM's process reads these media, while the context lasts; plain JSON.

        Args:
            token_ids: of the prompt.
            media: of the prompt.

        Raises:
            ValueError: one cannot be read.
        """
        with contextlib.ExitStack() as stack:
            yield [self._told(stack, token_ids, medium) for medium in media]

    def _told(self, stack: contextlib.ExitStack, token_ids: Sequence[int], medium: Media) -> dict[str, Any]:
        assert self._reader is not None, "a prompt with media is checked by a reader"
        shared = stack.enter_context(self._use(medium))
        token, (start, end) = self._reader.token_ids[medium.kind], medium.span
        return {
            "kind": medium.kind,
            "hash": shared.hash,
            "grid": list(medium.grid),
            "start": start,
            "places": [int(token_id == token) for token_id in token_ids[start:end]],
            "seconds_per_patch": medium.seconds_per_patch if self._reader.tells_seconds else 1.0,
            **shared.bucket,
        }

    @contextlib.contextmanager
    def _use(self, medium: Media) -> Iterator[_Shared]:
        key = (medium.kind, medium.key, medium.grid)
        if key not in self._shared:
            self._shared[key] = self._share(medium)
        shared = self._shared[key]
        shared.num_users += 1
        try:
            yield shared
        finally:
            shared.num_users -= 1
            if not shared.num_users:
                del self._shared[key]
                shared.memory.close()

    def _share(self, medium: Media) -> _Shared:
        assert self._reader is not None, "a prompt with media is checked by a reader"
        patches = self._reader.pixels(medium).to(torch.float32).contiguous()
        memory = contextlib.ExitStack()
        bucket = memory.enter_context(shared_bucket([("patches", patches)]))
        return _Shared(memory, bucket, content_hash(medium, patches))


def content_hash(medium: Media, patches: Tensor) -> str:
    """Equal for media that a model cannot tell apart, and for no others: pictures may come from anywhere.

    Args:
        medium: the medium.
        patches: [P, C t p p].
    """
    text = f"{medium.kind} {medium.grid} {tuple(patches.shape)} {patches.dtype} {medium.seconds_per_patch}"
    state = hashlib.blake2b(text.encode(), digest_size=32)
    state.update(patches.view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
