"""Seconds of the stages of a step, by the work of passes and the speed of a device."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from strop.trainer.config import Config
from strop.trainer.plan.batches import Lengths
from strop.trainer.plan.devices import FEW_ROWS, Device
from strop.trainer.plan.generation_memory import cache_form
from strop.trainer.plan.roles import RolePlan
from strop.trainer.plan.tracing import Work
from strop.trainer.role_columns import columns_before_updates

POINTS = 48
"""Moments of generation at which a decode step is priced."""
OVERLAP = 0.6
"""Share of the traffic of sharded parameters that passes hide."""
LAYER_S = 65e-6
"""Of a layer in a captured decode step on an accelerator, beside what it reads: the native engine's 64 and 256
sequences on an H100 (benchmarks/RESULTS.md)."""
REDUCE_S = 12e-6
"""Of an all-reduce of a few tokens, beside what it sends."""
LAYER_CALLS = 60
"""Operators of a layer in a decode step by torch."""
SAMPLE_S = 30e-6
"""Host's share of a decode step, and per running sequence of its record a thirtieth of that."""


def generation_seconds(
    config: Config, actor: RolePlan, device: Device, *, engines: int, ranks: int, samples: int
) -> float:
    """Seconds in which an engine plays its share of the samples of a step.

    Args:
        config: of the run.
        actor: the policy.
        device: of each rank.
        engines: that share the samples.
        ranks: of an engine, over which its matrices are cut.
        samples: of all engines.
    """
    count = max(1, -(-samples // engines))
    lengths = tuple(actor.lengths.quantiles(count))
    slots = min(config.rollout.max_running, count)
    ends = _ends(lengths, slots)
    last = ends[-1]
    cache = cache_form(config, actor, engines * ranks, tensor=ranks)
    prefill = _prefill_seconds(
        actor, device, prompts=max(1.0, config.data.prompts_per_step / engines), ranks=ranks
    )
    total, half = 0.0, sum(lengths) / len(lengths) / 2
    for point in range(POINTS):
        step = (point + 0.5) * last / POINTS
        running = min(slots, len(ends) - bisect_right(ends, step))
        context = actor.lengths.prompt + min(step, half if count > slots else step)
        total += (
            decode_seconds(
                actor, device, running=running, context=context, token_bytes=cache.token_bytes, ranks=ranks
            )
            * last
            / POINTS
        )
    return prefill + total


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
    actor: RolePlan, device: Device, *, running: float, context: float, token_bytes: float, ranks: int
) -> float:
    """Of a decode step of an engine with so many sequences of so many tokens."""
    sizes, item = actor.sizes, actor.form.compute_dtype.itemsize
    touched = sizes.active
    if sizes.experts_per_token < 1:  # experts that some token goes to are read
        experts = sum(part.experts.total for part in sizes.layers)
        share = 1 - (1 - sizes.experts_per_token) ** max(1.0, running)
        touched += experts * (share - sizes.experts_per_token)
    weights = touched * item / ranks / device.weight_bandwidth
    products = 2 * sizes.active * running / ranks / device.product_flops
    cache = running * context * token_bytes / device.weight_bandwidth
    logits = running * sizes.vocab * 4 * 4 / device.bandwidth
    layers = len(sizes.layers)
    if device.is_cpu:
        if actor.form.is_sharded or actor.form.lora.enabled:  # through the model's own forward pass
            weights = touched * item / ranks / device.few_rows_bandwidth * max(1.0, running / FEW_ROWS)
            weights += layers * LAYER_CALLS * device.call_s
        return max(weights, products) + cache + logits + SAMPLE_S * (3 + running / 3)
    sends = 0.0
    if ranks > 1:
        link = device.link if ranks <= device.per_node else device.network
        sends = 2 * layers * (2 * running * sizes.hidden * item / link + REDUCE_S)
    return max(weights, products) + cache + logits + layers * LAYER_S + sends + SAMPLE_S * (1 + running / 30)


def _prefill_seconds(actor: RolePlan, device: Device, *, prompts: float, ranks: int) -> float:
    tokens = prompts * actor.lengths.prompt
    share = tokens / max(1, actor.usual_batch.num_tokens)
    layers: Work = sum((actor.usual_passes.layers[kind].forward for kind in actor.usual_passes.kinds), Work())
    return device.seconds(layers * share) / ranks


@dataclass(frozen=True, kw_only=True)
class PassSeconds:
    """Passes of a role over its share of an update's rows."""

    forward: float
    update: float
    """Forward, backward, and the optimizer step."""
    sent: float
    """Of these, waiting for other ranks; in an update."""


def pass_seconds(role: RolePlan, device: Device) -> PassSeconds:
    """Seconds of a rank of a role for the rows of one update."""
    passes, axes = role.usual_passes, role.axes
    middle = role.usual_batch.num_tokens
    tokens = sum(role.usual_tokens)
    num_batches = len(role.usual)
    times = tokens / max(1, middle)
    share, called = times / (axes.tensor * axes.pipeline), num_batches / axes.pipeline
    forward = device.seconds(_of_batches(passes.forward, share, called))
    both = device.seconds(_of_batches(passes.forward + passes.backward, share, called))
    bubble = (axes.pipeline - 1) / max(1, num_batches)
    forward *= 1 + bubble
    both *= 1 + bubble
    sent_forward, sent_both = _sent_seconds(role, device, num_batches)
    held = role.share(0).held
    optimizer = 0.0
    if role.learns:
        item = role.form.weights_dtype.itemsize
        optimizer = (held.trained * 9 * item) / (
            device.bandwidth if device.is_cpu else device.weight_bandwidth
        )
        if role.engine.offload != "none" and not device.is_cpu:
            optimizer += held.trained * 4 * item / 20e9
    return PassSeconds(forward=forward + sent_forward, update=both + sent_both + optimizer, sent=sent_both)


def _of_batches(work: Work, share: float, num_batches: float) -> Work:
    """Work of a rank over an update: computed by its share of the tokens, called for each micro-batch."""
    return replace(work * share, num_calls=work.num_calls * num_batches)


def _sent_seconds(role: RolePlan, device: Device, num_batches: int) -> tuple[float, float]:
    """Seconds that the traffic of ranks adds to a forward pass, and to an update."""
    axes, engine, sizes = role.axes, role.engine, role.sizes
    if axes.world == 1:
        return 0.0, 0.0
    item = role.form.compute_dtype.itemsize
    share = role.share(0)
    link = device.link if axes.world <= device.per_node else device.network
    inner = device.link if axes.tensor * axes.sequence <= device.per_node else device.network
    gathered = share.gathered.total * item * (axes.shards - 1) / axes.shards
    reduced = share.gathered.trained * 4 * (axes.shards - 1) / axes.shards
    passes = num_batches if engine.reshard_after_forward else 1
    of_forward = gathered * num_batches / link
    of_update = (gathered * (2 * passes if engine.reshard_after_forward else 1) + reduced) / link
    hidden = 0.0 if device.is_cpu else OVERLAP
    tokens = sum(role.usual_tokens)
    layers = len(share.layers)
    state = tokens * sizes.hidden * item
    tensor = 4 * layers * state * (axes.tensor - 1) / axes.tensor / inner
    rows = sizes.num_heads * sizes.key_dim + 2 * sizes.key_heads * sizes.key_dim
    sequence = 2 * layers * tokens * rows * item * (axes.sequence - 1) / axes.sequence / inner
    context = layers * (axes.context - 1) * tokens * 2 * sizes.key_heads * sizes.key_dim * item / inner
    experts = 0.0
    if axes.experts > 1 and sizes.experts_per_token < 1:
        wire = device.link if axes.experts <= device.per_node else device.network
        experts = 2 * layers * state * sizes.experts_chosen * (axes.experts - 1) / axes.experts / wire
    activations = tensor + sequence + context + experts
    return (
        of_forward * (1 - hidden) + activations,
        of_update * (1 - hidden) + 2 * activations,
    )


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of the stages of a step."""

    stages: Mapping[str, float]
    step: float
    idle_share: float
    """Of all devices, over the step: waiting for the longest answer, for other ranks, or for the other pool."""


@dataclass(frozen=True, kw_only=True)
class GenerationTime:
    """Generation of the samples of a step."""

    seconds: float
    busy: float
    """Share of the slots of an engine with a sequence."""


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """Passes and updates of the roles of a step."""

    stages: Mapping[str, float]
    sent: float
    """Of these, waiting for other ranks."""


def step_time(config: Config, roles: Sequence[RolePlan], device: Device) -> StepTime:
    """Seconds of a step.

    Args:
        config: of the run.
        roles: with a model, the policy first.
        device: of every rank.
    """
    generation = generation_time(config, roles[0], device)
    return joined(config, roles[0], device, generation, training_time(config, roles, device))


def engines_of(config: Config, actor: RolePlan) -> tuple[int, int]:
    """Engines that share the samples of a step, and ranks of each."""
    own, apart = config.rollout.own_processes, apart_devices(config)
    ranks = own.num_devices if own is not None else 1 if apart else _generating_ranks(actor)
    return max(1, (apart or actor.axes.world) // ranks), ranks


def generation_time(config: Config, actor: RolePlan, device: Device) -> GenerationTime:
    """Of a step; of the policy's axes only `engines_of` asks."""
    engines, ranks = engines_of(config, actor)
    samples = config.samples_per_step
    seconds = generation_seconds(config, actor, device, engines=engines, ranks=ranks, samples=samples)
    return GenerationTime(seconds=seconds, busy=_busy(actor.lengths, config, engines=engines))


def training_time(config: Config, roles: Sequence[RolePlan], device: Device) -> TrainingTime:
    """Of a step; arguments as of `step_time`."""
    stages = dict[str, float]()
    made = columns_before_updates(config, config.samples_per_step)
    sent = 0.0
    for role in roles:
        seconds = pass_seconds(role, device)
        if role.name == "actor":
            if "old_log_probs" in made:
                stages["old_log_prob"] = seconds.forward * role.updates
            if "ref_log_prob" in made and "reference" not in config.roles:
                stages["ref"] = seconds.forward * role.updates
            stages["update_actor"] = seconds.update * role.updates * role.epochs
        else:
            name = {"reference": "ref", "critic": "values"}.get(role.name, role.name)
            stages[name] = seconds.forward * role.updates
            if role.learns:
                stages[f"update_{role.name}"] = seconds.update * role.updates * role.epochs
        sent += seconds.sent * role.updates * role.epochs
    return TrainingTime(stages=stages, sent=sent)


def joined(
    config: Config, actor: RolePlan, device: Device, generation: GenerationTime, training: TrainingTime
) -> StepTime:
    """A step of its two parts, and the weights that go from one to the other."""
    apart, main = apart_devices(config), actor.axes.world
    gen, sync = generation.seconds, 0.0
    stages = {"gen": gen, **training.stages}
    if apart or config.rollout.own_processes is not None:
        wire = device.network if main + apart > device.per_node else device.link
        senders = max(1, main // device.per_node)
        sync = actor.sizes.total * actor.form.compute_dtype.itemsize / wire / senders
        stages["update_weights"] = sync
    trains = sum(training.stages.values())
    is_ahead = apart and config.rollout.max_staleness > 0
    step = (max(gen, trains) if is_ahead else gen + trains) + sync
    worked = gen * generation.busy * (apart or main) + (trains - training.sent) * main
    total = step * (apart + main)
    return StepTime(stages=stages, step=step, idle_share=max(0.0, 1 - worked / total) if total else 0.0)


def apart_devices(config: Config) -> int:
    """Devices that only generate."""
    return devices_of(config, "rollout") if "rollout" in config.resources.apart else 0


def devices_of(config: Config, role: str) -> int:
    """Devices of a role: one of each process, or as many as its engine spans."""
    each = config.rollout.num_devices if role == "rollout" and role in config.resources.apart else 1
    return config.resources.ranks_of(role) * each


def all_devices(config: Config) -> int:
    """Devices of all pools."""
    return config.resources.ranks + sum(devices_of(config, role) for role in config.resources.apart)


def _generating_ranks(actor: RolePlan) -> int:
    """Ranks that generate together, with the actor's own weights."""
    return actor.axes.tensor * actor.axes.pipeline * (actor.axes.experts if actor.axes.experts > 1 else 1)


def _busy(lengths: Lengths, config: Config, *, engines: int) -> float:
    """Share of the slots of an engine with a sequence, over generation."""
    count = max(1, -(-config.samples_per_step // engines))
    each = tuple(lengths.quantiles(count))
    slots = min(config.rollout.max_running, count)
    return min(1.0, sum(each) / (slots * _ends(each, slots)[-1]))
