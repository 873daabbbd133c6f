"""Seconds of the passes of a role, of its optimizer, and of the traffic between its ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from strop.engines.config import OptimizerConfig
from strop.engines.parallel.traffic import all_gather, all_to_all, summed
from strop.trainer.plan.devices import Device
from strop.trainer.plan.roles import RolePlan
from strop.trainer.plan.tracing import Work
from strop.trainer.plan.trial import PassTimes, pass_ratios, pass_times

COLLECTIVES = 4
"""Of a layer over tensor-parallel ranks, forward."""
BESIDE_LAYERS = 4
"""The same of a pass beside its layers: embeddings, hidden states, and two of the head."""
OVERLAP = 0.6
"""Share of the traffic of sharded parameters that passes hide."""
HOST_BANDWIDTH = 20e9
"""Bytes per second between an accelerator and its host."""
TRIAL_S = 0.4
"""Of the products of an update that is carried out."""
LEAST_TOKENS = 64
TRIAL_BYTES = 64
"""Of each number of a model that is carried out: with gradients and activations, and most of a machine left."""


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
    ratios = update_ratios(role, device)
    planned = pass_times(passes, lambda work: device.seconds(_of_batches(work, share, called)))
    forward = planned.layers_forward * ratios.layers_forward + planned.base_forward * ratios.base_forward
    backward = planned.layers_backward * ratios.layers_backward + planned.base_backward * ratios.base_backward
    both = forward + backward
    bubble = (axes.pipeline - 1) / max(1, num_batches)
    forward *= 1 + bubble
    both *= 1 + bubble
    sent_forward, sent_both = _sent_seconds(role, device, num_batches)
    optimizer = 0.0 if role.optim is None else _optimizer_seconds(role, role.optim, device)
    return PassSeconds(forward=forward + sent_forward, update=both + sent_both + optimizer, sent=sent_both)


def _optimizer_seconds(role: RolePlan, optim: OptimizerConfig, device: Device) -> float:
    """Of a step: weights, gradients and state are read and written once, and matrices of Muon are orthogonalised."""
    held, item = role.share(0).held, role.form.weights_dtype.itemsize
    seconds = held.trained * 9 * item / device.weight_bandwidth
    if optim.name == "muon":
        seconds += held.muon_flops / device.half_flops
    if role.engine.offload != "none" and not device.is_cpu:
        seconds += held.trained * 4 * item / HOST_BANDWIDTH
    return seconds


def update_ratios(role: RolePlan, device: Device) -> PassTimes:
    """Real passes beside those of a device's rates; an accelerator is not here."""
    if not has_trial(role, device):
        return PassTimes()
    tokens = TRIAL_S * device.product_flops / (6 * role.sizes.in_trial)
    batch = role.small_batch(max(LEAST_TOKENS, int(tokens)))
    return pass_ratios(role.shape, role.form, batch, device.seconds, device.threads)


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
    syncs = num_batches if engine.gradient_sync == "each" else 1
    link = device.link if axes.world <= device.per_node else device.network
    inner = device.link if axes.tensor * axes.sequence <= device.per_node else device.network
    gathered = all_gather(share.gathered.total * item / axes.shards, axes.shards)
    gradients = share.gathered.trained * max(4, item) / axes.shards
    reduced = summed(gradients * syncs, shards=axes.shards, copies=axes.copies)
    passes = num_batches if engine.reshard_after_forward else 1
    of_forward = gathered * num_batches / link
    of_update = (gathered * (2 * passes if engine.reshard_after_forward else 1) + reduced) / link
    hidden = 0.0 if device.is_cpu else OVERLAP
    tokens = sum(role.usual_tokens)
    layers = len(share.layers)
    state = tokens * sizes.hidden * item
    tensor = COLLECTIVES * layers * all_gather(state / axes.tensor, axes.tensor) / inner
    if axes.tensor > 1:
        tensor += (COLLECTIVES * layers + BESIDE_LAYERS) * num_batches * device.collective_s
    keys = 2 * tokens * sizes.key_heads * sizes.key_dim * item
    heads = tokens * sizes.num_heads * sizes.key_dim * item + keys
    sequence = 2 * layers * all_to_all(heads, axes.sequence) / inner
    context = layers * all_gather(keys, axes.context) / inner
    experts = 0.0
    if axes.experts > 1 and sizes.experts_per_token < 1:
        wire = device.link if axes.experts <= device.per_node else device.network
        experts = 2 * layers * all_to_all(state * sizes.experts_chosen, axes.experts) / wire
    activations = tensor + sequence + context + experts
    return (
        of_forward * (1 - hidden) + activations,
        of_update * (1 - hidden) + 2 * activations,
    )


def has_trial(role: RolePlan, device: Device) -> bool:
    """The first layers of a role's model are small enough to be carried out here."""
    return device.is_cpu and role.sizes.in_trial * TRIAL_BYTES < device.memory_bytes
