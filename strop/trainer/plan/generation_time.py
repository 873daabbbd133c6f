"""Seconds of generation: prompts, and decode steps of sequences that end one after the other."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from strop.rollout.types import Sampling
from strop.trainer.config import Config
from strop.trainer.plan.batches import Lengths
from strop.trainer.plan.devices import FEW_ROWS, Device
from strop.trainer.plan.generation_memory import has_fused_steps, token_bytes
from strop.trainer.plan.pass_time import COLLECTIVES, has_trial, update_ratios
from strop.trainer.plan.roles import RolePlan
from strop.trainer.plan.sampling_cost import sampling_cost, sampling_of
from strop.trainer.plan.trial import NUM_DECODED, DecodeTimes, decode_times

POINTS = 48
"""Moments of generation at which a decode step is priced."""
LAYER_S = 65e-6
"""Of a layer in a captured decode step on an accelerator, beside what it reads: the native engine's 64 and 256
sequences on an H100 (benchmarks/RESULTS.md)."""
LAYER_CALLS = 60
"""Operators of a layer in a decode step by torch."""
TRIAL_SEQUENCES, TRIAL_CONTEXT, TRIAL_STEP_S = 64, 512, 0.01
"""Most sequences and tokens of a decode step that is carried out, and seconds of its products."""
STEP_COLLECTIVES = 7
"""Of a decode step beside its layers: embeddings, hidden states, four of sampling, and what ranks tell each other
before it."""
SAMPLE_S = 30e-6
"""Host's share of a decode step, and per running sequence of its record a thirtieth of that."""


@dataclass(frozen=True, kw_only=True)
class GenerationTime:
    """Generation of the samples of a step."""

    seconds: float
    busy: float
    """Share of the slots of an engine with a sequence."""


def engines_of(config: Config, actor: RolePlan) -> tuple[int, int]:
    """Engines that share the samples of a step, and ranks of each."""
    own, apart = config.rollout.own_processes, apart_devices(config)
    ranks = own.num_devices if own is not None else 1 if apart else _generating_ranks(actor)
    return max(1, (apart or actor.axes.world) // ranks), ranks


def generation_time(config: Config, actor: RolePlan, device: Device) -> GenerationTime:
    """Of a step; of the policy's axes only `engines_of` asks."""
    engines, ranks = engines_of(config, actor)
    both = partial(generation_seconds, config, actor, device, engines=engines, ranks=ranks)
    seconds = both(samples=config.samples_per_step)
    if config.needs("reward_baselines"):
        seconds += both(samples=config.data.prompts_per_step, are_greedy=True)
    return GenerationTime(seconds=seconds, busy=_busy(actor.lengths, config, engines=engines))


def generation_seconds(
    config: Config,
    actor: RolePlan,
    device: Device,
    *,
    engines: int,
    ranks: int,
    samples: int,
    are_greedy: bool = False,
) -> float:
    """Seconds in which an engine plays its share of the samples of a step.

    Args:
        config: of the run.
        actor: the policy.
        device: of each rank.
        engines: that share the samples.
        ranks: of an engine, over which its matrices are cut.
        samples: of all engines.
        are_greedy: these are answers beside the samples, to the same prompts: those are computed once for both, and so
            are weights packed.
    """
    if "rollout" in config.resources.apart:
        actor = actor.alone()
    sampling = sampling_of(config.rollout)
    if are_greedy:
        sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
    count = max(1, -(-samples // engines))
    lengths = tuple(actor.lengths.quantiles(count))
    slots = min(config.rollout.max_running, count)
    ends = _ends(lengths, slots)
    last = ends[-1]
    ratios = decode_ratios(actor, device, running=slots, sampling=sampling)
    latents = config.rollout.own_processes is not None
    total, half = 0.0, sum(lengths) / len(lengths) / 2
    for point in range(POINTS):
        step = (point + 0.5) * last / POINTS
        running = min(slots, len(ends) - bisect_right(ends, step))
        context = actor.lengths.prompt + min(step, half if count > slots else step)
        whole, part = (
            decode_seconds(
                actor,
                device,
                running=running,
                context=context,
                ranks=n,
                sampling=sampling,
                holds_latents=latents,
            )
            for n in (1, ranks)
        )
        layers, rest = map(_real_seconds, whole, part, (ratios.layer, ratios.rest))
        sent = sent_seconds(actor, device, running=running, ranks=ranks)
        total += (layers + rest + sent) * last / POINTS
    if are_greedy:
        return total
    prompts = max(1.0, config.data.prompts_per_step / engines)
    prefill = _prefill_seconds(actor, device, prompts=prompts, ranks=ranks)
    return prefill + total + ratios.packed_number * actor.sizes.decoded


def _real_seconds(whole: float, part: float, ratio: float) -> float:
    """Seconds of one of several ranks, of planned ones of all the work and of its part, and the ratio of real ones of
    all: where that is above 1, the rest is Python and small operators, of which a rank has as many."""
    return max(ratio * part, ratio * whole - (whole - part))


def decode_ratios(actor: RolePlan, device: Device, *, running: int, sampling: Sampling) -> DecodeTimes:
    """Real decode steps beside planned ones (`decode_seconds`), both of the whole model on one rank; an accelerator is
    not here."""
    if not has_trial(actor, device):
        return DecodeTimes(layer=1.0, rest=1.0, packed_number=0.0)
    head = actor.sizes.head_numbers
    token_s = 2 * ((actor.sizes.in_trial - head) / device.product_flops + head / device.wide_flops)
    in_time = int(TRIAL_STEP_S / token_s)
    few = max(1, min(running, TRIAL_SEQUENCES, in_time))
    longest = actor.lengths.longest
    prompt = max(1, min(max(longest - NUM_DECODED, longest // 2), TRIAL_CONTEXT))
    real = decode_times(actor.shape, actor.form, few, prompt, device.threads, sampling)
    layers, rest = decode_seconds(
        actor, device, running=few, context=real.context, ranks=1, sampling=sampling
    )
    return DecodeTimes(
        layer=real.layer * len(actor.sizes.layers) / layers,
        rest=real.rest / rest,
        packed_number=real.packed_number,
    )


@lru_cache(maxsize=256)
def _ends(lengths: tuple[int, ...], slots: int) -> list[int]:
    """Decode steps at which sequences end, long and short ones mixed, when each takes the next free slot."""
    mixed = [lengths[(number * 7919) % len(lengths)] for number in range(len(lengths))]
    if len(lengths) % 7919 == 0:
        mixed = list(lengths)
    running: list[int] = []
    ends = []
    for length in mixed:
        start = heapq.heappop(running) if len(running) >= slots else 0
        heapq.heappush(running, start + length)
        ends.append(start + length)
    return sorted(ends)


def decode_seconds(
    actor: RolePlan,
    device: Device,
    *,
    running: float,
    context: float,
    ranks: int,
    sampling: Sampling,
    holds_latents: bool = False,
) -> tuple[float, float]:
    """Of a decode step of an engine with so many sequences of so many tokens, by the rates of a device: layers, and
    what is beside them, without what ranks send each other; `holds_latents` as of `token_bytes`."""
    sizes, item, layers = actor.sizes, actor.form.compute_dtype.itemsize, len(actor.sizes.layers)
    touched = sizes.active - sizes.head_numbers
    if sizes.experts_per_token < 1:  # experts that some token goes to are read
        share = 1 - (1 - sizes.experts_per_token) ** max(1.0, running)
        touched += sizes.experts_total * (share - sizes.experts_per_token)
    bandwidth, rows = device.weight_bandwidth, 1.0
    through_torch = device.is_cpu and not has_fused_steps(actor)
    if through_torch:  # by the model's own forward pass
        bandwidth, rows = device.few_rows_bandwidth, max(1.0, running / FEW_ROWS)

    def products(read: float, used: float, item: int, flops: float) -> float:
        return max(read * item / ranks / bandwidth * rows, 2 * used * running / ranks / flops)

    seen = running * sizes.seen_tokens(context)
    cache = seen * token_bytes(actor, tensor=ranks, holds_latents=holds_latents) / device.weight_bandwidth
    in_layers = products(touched, sizes.active - sizes.head_numbers, item, device.product_flops) + cache
    of_head = max(item, 4) if has_fused_steps(actor) else item
    rest = products(sizes.head_numbers, sizes.head_numbers, of_head, device.wide_flops)
    moved = sampling_cost(sampling, actor.form.compute_dtype, is_accelerator=not device.is_cpu).moved
    rest += running * sizes.vocab * moved / device.bandwidth
    if device.is_cpu:
        in_layers += layers * LAYER_CALLS * device.call_s if through_torch else 0.0
        return in_layers, rest + SAMPLE_S * (3 + running / 3)
    return in_layers + layers * LAYER_S, rest + SAMPLE_S * (1 + running / 30)


def sent_seconds(actor: RolePlan, device: Device, *, running: float, ranks: int) -> float:
    """Of a decode step of so many sequences, for the ranks of an engine to send each other their parts."""
    if ranks == 1:
        return 0.0
    link = device.link if ranks <= device.per_node else device.network
    sizes = actor.sizes
    sent = running * sizes.hidden * actor.form.compute_dtype.itemsize
    in_layers = COLLECTIVES * len(sizes.layers)
    return in_layers * sent / link + (in_layers + STEP_COLLECTIVES) * device.collective_s


def _prefill_seconds(actor: RolePlan, device: Device, *, prompts: float, ranks: int) -> float:
    tokens = prompts * actor.lengths.prompt
    share = tokens / max(1, actor.usual_batch.num_tokens)
    seconds = device.seconds(actor.usual_passes.layers_forward * share) / ranks
    return seconds * update_ratios(actor, device).layers_forward


def apart_devices(config: Config) -> int:
    """Devices that only generate."""
    return devices_of(config, "rollout") if "rollout" in config.resources.apart else 0


def devices_of(config: Config, role: str) -> int:
    """Devices of a role: one of each process, or as many as its engine spans."""
    each = config.rollout.num_devices if role == "rollout" and role in config.resources.apart else 1
    return config.resources.ranks_of(role) * each


def _generating_ranks(actor: RolePlan) -> int:
    """Ranks that generate together, with the actor's own weights."""
    return actor.axes.tensor * actor.axes.pipeline * (actor.axes.experts if actor.axes.experts > 1 else 1)


def _busy(lengths: Lengths, config: Config, *, engines: int) -> float:
    """Share of the slots of an engine with a sequence, over generation."""
    count = max(1, -(-config.samples_per_step // engines))
    each = tuple(lengths.quantiles(count))
    slots = min(config.rollout.max_running, count)
    return min(1.0, sum(each) / (slots * _ends(each, slots)[-1]))
