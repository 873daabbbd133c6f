"""Memory of a rank that generates: beside the roles, or apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from strop.engines.causal_lm import use_packed_attention
from strop.engines.segments import Segment
from strop.rollout.native.cache import GROW_TOKENS
from strop.rollout.native.cpu.steps import fused_step
from strop.rollout.native.paged_cache import PAGE_TOKENS, POOL_SHARE, num_pages
from strop.rollout.native.prefill import DEVICE_PREFILL_TOKENS, PREFILL_TOKENS
from strop.trainer.config import Config
from strop.trainer.plan.heap_gaps import gathered_gaps
from strop.trainer.plan.meta_model import PassForm, causal_lm, truncated_module
from strop.trainer.plan.parameters import Axes
from strop.trainer.plan.passes import PackedShape
from strop.trainer.plan.roles import RolePlan, Shape
from strop.trainer.plan.sampling_cost import sampling_cost, sampling_of
from strop.trainer.plan.state_memory import PhaseMemory, host_parts, state_parts, weight_bytes
from strop.trainer.plan.transfer_memory import bucket_parts

KEYS = "keys and values"
"""Name of the part of a phase."""


@dataclass(frozen=True, kw_only=True)
class CacheForm:
    """Keys and values of the sequences of one rank that generates."""

    slots: int
    tokens: int
    """Of all of them."""
    token_bytes: float
    least: int
    """Tokens of the longest one alone."""

    @property
    def num_bytes(self) -> float:
        """Of the table, or of the pool of pages."""
        return self.tokens * self.token_bytes

    def pool_bytes(self, free: float) -> float:
        """Of a pool of pages beside which so much is free with it: sequences that find no page wait."""
        return min(self.num_bytes, max(self.least * self.token_bytes, POOL_SHARE * free))


def cache_form(
    config: Config, actor: RolePlan, ranks: int, *, is_cpu: bool, tensor: int = 1, pipeline: int = 1
) -> CacheForm:
    """The keys and values of a rank that generates, when all answers are as long as they may be: those of a step, or of
    a validation. On a CPU each has a slot; on a device, pages, and samples share the full ones of their prompt.

    Args:
        config: of the run.
        actor: the policy.
        ranks: that generate.
        is_cpu: on a CPU.
        tensor, pipeline: of these, ranks that share heads, and layers, of the same sequences.
    """
    group = tensor * pipeline
    most = config.rollout.max_running * group
    prompts, sequences = (-(-count * group // ranks) for count in most_played(config))
    if knows_no_validation(config):
        prompts, sequences = max(prompts, most), max(sequences, most)
    slots = min(most, sequences)
    prompt, longest = actor.lengths.prompt, actor.lengths.prompt + actor.lengths.max_response
    if is_cpu:
        least = -(-longest // GROW_TOKENS) * GROW_TOKENS
        tokens = slots * least
    else:
        own = num_pages(longest) - prompt // PAGE_TOKENS
        least, tokens = (
            (1 + count * num_pages(prompt) + running * own) * PAGE_TOKENS
            for count, running in ((1, 1), (prompts, slots))
        )
    return CacheForm(
        slots=slots,
        tokens=tokens,
        least=least,
        token_bytes=token_bytes(actor, tensor=tensor, pipeline=pipeline),
    )


def most_played(config: Config) -> tuple[int, int]:
    """Prompts and sequences that are played together: of a step, or of a validation whose size is known, where it has
    more of them. A prompt takes its pages as long as it waits."""
    prompts, sequences = config.data.prompts_per_step, config.samples_per_step
    if config.data.val_files and config.data.max_val_prompts is not None:
        held_out = config.data.max_val_prompts
        prompts = max(prompts, held_out)
        sequences = max(sequences, held_out * config.eval.samples_per_prompt)
    return prompts, sequences


def knows_no_validation(config: Config) -> bool:
    """There is a validation, of so many prompts as its files have: no file is read here."""
    return bool(config.data.val_files) and config.data.max_val_prompts is None


def token_bytes(actor: RolePlan, *, tensor: int = 1, pipeline: int = 1, holds_latents: bool = False) -> float:
    """Keys and values of a token on a rank, with `tensor` and `pipeline` as of `cache_form`.

    Args:
        actor: the policy.
        tensor, pipeline: ranks.
        holds_latents: of latent attention, each rank has what keys and values are made of, and not these: vLLM and
            SGLang. The native engine has them expanded.
    """
    sizes, item = actor.sizes, actor.form.compute_dtype.itemsize
    layers = len(sizes.layers) / pipeline
    if holds_latents and sizes.latent_dim:
        return layers * sizes.latent_dim * item
    return 2 * layers * max(1.0, sizes.key_heads / tensor) * sizes.key_dim * item


def accelerator_cache(config: Config, actor: RolePlan) -> CacheForm:
    """Keys and values of a rank of an accelerator that generates, beside the roles or apart."""
    if "rollout" in config.resources.apart:
        return cache_form(config, actor.alone(), config.resources.apart["rollout"], is_cpu=False)
    axes = actor.axes
    return cache_form(config, actor, axes.world, is_cpu=False, tensor=axes.tensor, pipeline=axes.pipeline)


def held_keys(phases: Sequence[PhaseMemory]) -> float:
    """Bytes of keys and values of the phase that generates; 0 of an engine whose memory is not counted."""
    return next((phase.device[KEYS] for phase in phases if KEYS in phase.device), 0.0)


def running_at_once(config: Config, actor: RolePlan, phases: Sequence[PhaseMemory]) -> int:
    """Sequences that an engine of an accelerator runs at a time, of those that it may: as many, half done, as its pool
    has tokens for. A group shares its prompt.

    Args:
        config, actor: of the run.
        phases: of a rank that generates, or of all its phases.
    """
    most, own = config.rollout.max_running, config.rollout.own_processes
    held = held_keys(phases)
    if not held:
        return most
    axes = Axes() if "rollout" in config.resources.apart or own is not None else actor.axes
    tensor = axes.tensor if own is None else own.num_devices
    each_token = token_bytes(actor, tensor=tensor, pipeline=axes.pipeline, holds_latents=own is not None)
    pool = held / each_token
    lengths = actor.lengths
    each = lengths.prompt / config.rollout.samples_per_prompt + lengths.mean_response / 2
    return max(1, min(most, int(axes.experts * pool / each)))


def rollout_phase(
    config: Config,
    actor: RolePlan,
    others: Mapping[str, float],
    device_bytes: float | None,
    *,
    heap_left: float = 0.0,
) -> PhaseMemory:
    """Generation on the devices of the actor.

    Args:
        config, actor: of the run.
        others: memory of the roles beside it.
        device_bytes: memory of an accelerator; None of a CPU.
        heap_left: bytes that training has left free in the heap of a process on a CPU. They stay with the process:
            what generation takes of the heap fits into them, keys and values do not.
    """
    phase = _before_prefill(config, actor, others, device_bytes)
    if config.rollout.own_processes is not None:
        return phase
    axes = actor.axes
    is_cpu = device_bytes is None
    cache = cache_form(config, actor, axes.world, is_cpu=is_cpu, tensor=axes.tensor, pipeline=axes.pipeline)
    prefill = _prefill_bytes(config, actor, cache, engines=axes.data, tensor=axes.tensor, is_cpu=is_cpu)
    of_training = max(0.0, heap_left - prefill - sum(_generation_copies(actor, is_cpu).values()))
    parts = {**phase.device, "prefill and logits": prefill}
    return dataclasses.replace(
        phase, device=parts | ({"heap of training": of_training} if of_training else {})
    )


def _before_prefill(
    config: Config, actor: RolePlan, others: Mapping[str, float], device_bytes: float | None
) -> PhaseMemory:
    """Generation, without what needs a trace."""
    is_cpu, own = device_bytes is None, config.rollout.own_processes
    others = {name: size for name, size in others.items() if name != "actor: idle"}
    state = state_parts(actor, 0, is_cpu, gradients=False, optimizer=actor.engine.offload == "none")
    if config.resources.offload_idle and own and not is_cpu:
        state = {}
    if own is not None:
        device = {**state, **others}
        if device_bytes is not None:
            device |= _engine_parts(config, actor, device_bytes)
        return PhaseMemory(phase="rollout", device=device)
    axes = actor.axes
    cache = cache_form(config, actor, axes.world, is_cpu=is_cpu, tensor=axes.tensor, pipeline=axes.pipeline)
    copies = _generation_copies(actor, is_cpu)
    held = cache.num_bytes
    if device_bytes is not None:
        held = cache.pool_bytes(device_bytes - sum({**state, **others, **copies}.values()))
    parts = {**state, **others, KEYS: held, **copies}
    return PhaseMemory(phase="rollout", device=parts, host=host_parts(actor, 0, is_cpu, gradients=False))


def _engine_parts(config: Config, actor: RolePlan, device_bytes: float) -> dict[str, float]:
    """Of an engine in processes of its own: it begins with its weights, and takes all that is left of its share of the
    device for keys and values. Where the longest sequence has no room beside the weights it does not begin, so that
    what it leaves to others counts as well."""
    own, engine = config.rollout.own_processes, config.rollout.engine
    assert own is not None, "the caller asks whether there are"
    room = own.memory_share * device_bytes
    weights = actor.sizes.total * actor.form.compute_dtype.itemsize / own.num_devices
    longest = actor.lengths.prompt + actor.lengths.max_response
    least = longest * token_bytes(actor, tensor=own.num_devices, holds_latents=True)
    parts = {f"weights of {engine}": weights, KEYS: max(least, room - weights)}
    if weights + least > room:
        parts[f"left free by {engine}"] = device_bytes - room
    return parts


def freed_copies(actor: RolePlan) -> float:
    """Bytes that generation gives back to the heap of a process, and that pieces of the same sizes do not fit into:
    parameters that sharded ranks gather for it."""
    if not actor.form.is_sharded:
        return 0.0
    return gathered_gaps(actor, sum(_generation_copies(actor, is_cpu=True).values()))


def _generation_copies(actor: RolePlan, is_cpu: bool) -> dict[str, float]:
    """Weights that are gathered, packed or rounded for generation."""
    sizes, item = actor.sizes, actor.form.compute_dtype.itemsize
    if actor.form.is_sharded:
        share = actor.share(0)
        if actor.axes.shards == 1 and item == actor.form.weights_dtype.itemsize:
            return {}
        return {"gathered parameters": share.gathered.total * item}
    if is_cpu and has_fused_steps(actor):
        return {"packed weights": sizes.products.total * item + sizes.head_numbers * 4}
    if not is_cpu and item < 4:
        return {"weights in half precision": _rounded_numbers(actor) * item}
    return {}


def _rounded_numbers(actor: RolePlan) -> float:
    """Numbers of a rounded copy that an accelerator decodes with: those of products and head that are not held so."""
    sizes = actor.sizes
    if not actor.form.holds_half:
        return sizes.products.total + sizes.head_numbers
    is_tied = not sizes.head.all.total  # rows of embeddings stay wide
    adapters = sizes.products.trained if actor.learns else 0.0
    return adapters + (sizes.head_numbers if is_tied else 0.0)


def has_fused_steps(actor: RolePlan) -> bool:
    """A CPU decodes the model in C, and not by its own forward pass."""
    return not actor.form.is_accelerator and _has_fused_steps(actor.shape, actor.form)


@lru_cache(maxsize=64)
def _has_fused_steps(shape: Shape, form: PassForm) -> bool:
    if form.is_sharded:
        return False
    module, _, _ = truncated_module(shape.config, form)
    use_packed_attention(module, None, by_formula=form.by_formula)
    model = causal_lm(module, form)
    model.device = torch.device("cpu")
    return fused_step(model) is not None


def _prefill_bytes(
    config: Config, actor: RolePlan, cache: CacheForm, *, engines: int, tensor: int, is_cpu: bool
) -> float:
    """Of prompts that are computed together, their keys and values, and logits of the running sequences."""
    room = PREFILL_TOKENS if is_cpu else DEVICE_PREFILL_TOKENS
    prompts = min(config.data.prompts_per_step, max(1, room // actor.lengths.prompt))
    tokens = min(room, prompts * actor.lengths.prompt)
    each = max(1, tokens // prompts)
    segments = tuple(Segment(start=i * each, length=each) for i in range(prompts))
    passed = actor.traced_forward_bytes(PackedShape(segments=segments, num_predicted=prompts))
    kept = 0.0  # in pages, like those of the prompts that run
    if is_cpu:
        kept = config.data.prompts_per_step / engines * actor.lengths.prompt * cache.token_bytes
    sampling = sampling_of(config.rollout)
    sampled = sampling_cost(sampling, actor.form.compute_dtype, is_accelerator=not is_cpu)
    logits = cache.slots * actor.sizes.vocab * sampled.held
    return passed / tensor + 2 * tokens * cache.token_bytes + min(kept, cache.num_bytes) + logits


def apart_phase(config: Config, actor: RolePlan, device_bytes: float | None) -> PhaseMemory:
    """Generation on devices of its own."""
    ranks, is_cpu = config.resources.apart["rollout"], device_bytes is None
    sizes, item = actor.sizes, actor.form.compute_dtype.itemsize
    if (own := config.rollout.own_processes) is not None:
        parts = {f"weights of {config.rollout.engine}": sizes.total * item / own.num_devices}
        if device_bytes is not None:
            parts = _engine_parts(config, actor, device_bytes)
        return PhaseMemory(phase="rollout (apart)", device=parts)
    alone = actor.alone()
    cache = cache_form(config, alone, ranks, is_cpu=is_cpu)
    buckets, on_host = bucket_parts(config, actor, is_cpu)
    beside = {**buckets, **_generation_copies(alone, is_cpu)}
    weights, held = weight_bytes(alone, alone.share(0)), cache.num_bytes
    if device_bytes is not None:
        held = cache.pool_bytes(device_bytes - weights - sum(beside.values()))
    parts = {
        "weights": weights,
        KEYS: held,
        "prefill and logits": _prefill_bytes(config, alone, cache, engines=ranks, tensor=1, is_cpu=is_cpu),
        **beside,
    }
    return PhaseMemory(phase="rollout (apart)", device=parts, host=on_host)
