"""Memory of a rank in each phase of a step: on the device, and on its host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strop.engines.attention import Segment
from strop.engines.config import OptimizerConfig
from strop.engines.head import DEVICE_CHUNK_ELEMENTS
from strop.rollout.native.cache import GROW_TOKENS
from strop.rollout.native.prefill import DEVICE_PREFILL_TOKENS, PREFILL_TOKENS
from strop.rollout.weight_sync.slots import NUM_SLOTS
from strop.rollout.weight_sync.stream import BUCKET_BYTES
from strop.trainer.config import Config
from strop.trainer.plan.parameters import Count, Share, share_of
from strop.trainer.plan.passes import PackedShape
from strop.trainer.plan.roles import RolePlan

HEAP_GAPS = 0.08
"""Share of activations by which the heap of a process on a CPU is larger: freed pieces that nothing fits into
(benchmarks/RESULTS.md; adapters, whose pieces are of many sizes, leave more)."""
EIGHT_BIT_BYTES = 2 * (1 + 4 / 256)
"""Of a number in adamw_8bit: two moments in a byte each, and a scale for 256 of them."""


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """Memory of one rank in a phase."""

    phase: str
    device: Mapping[str, float]
    """Bytes by purpose."""
    host: Mapping[str, float] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """All on the device."""
        return int(sum(self.device.values()))

    @property
    def host_bytes(self) -> int:
        """All on the host."""
        return int(sum(self.host.values()))


@dataclass(frozen=True, kw_only=True)
class Resident:
    """State of a role on a rank between its calls."""

    weights: float
    optimizer: float
    gradients: float
    """While it learns."""

    @property
    def between(self) -> float:
        """Of these, there all the time."""
        return self.weights + self.optimizer


def resident(role: RolePlan, stage: int = 0) -> Resident:
    """Bytes of the state of a rank."""
    share = share_of(role.sizes, role.axes, role.engine, stage)
    item = role.form.weights_dtype.itemsize
    return Resident(
        weights=weight_bytes(role, share),
        optimizer=0.0 if role.optim is None else optimizer_bytes(share.held, role.optim, item),
        gradients=share.held.trained * item if role.learns else 0.0,
    )


def weight_bytes(role: RolePlan, share: Share) -> float:
    """Bytes of a rank's weights; those of products that nothing trains are half of that."""
    form, sizes = role.form, role.sizes
    wide, narrow = form.weights_dtype.itemsize, form.compute_dtype.itemsize
    if not form.holds_half:
        return share.held.total * wide
    if form.is_sharded and not role.learns:
        return share.held.total * narrow
    rounded = sizes.linear + (sizes.head.all.total if form.is_accelerator else 0.0)
    if role.learns:  # adapters are linear layers too
        rounded -= sizes.trained
    return share.held.total * (wide - (wide - narrow) * rounded / sizes.total)


def optimizer_bytes(count: Count, optim: OptimizerConfig, item: int) -> float:
    """Bytes of an optimizer's state."""
    if optim.name == "adamw_8bit":
        return count.trained * EIGHT_BIT_BYTES
    if optim.name == "muon":
        return (count.matrices + 2 * (count.trained - count.matrices)) * item
    return 2 * count.trained * item


def phases_of(config: Config, roles: Sequence[RolePlan], *, device_bytes: float | None) -> list[PhaseMemory]:
    """The phases of the ranks of the main pool, where the actor is, and of pools apart.

    Args:
        config: of the run.
        roles: with a model, the policy first.
        device_bytes: memory of an accelerator; None of a CPU, where device and host are one.
    """
    main = [role for role in roles if role.name not in config.resources.apart]
    actor = roles[0]
    is_cpu = device_bytes is None
    phases = [_load(main)] if is_cpu else []
    generates_here = "rollout" not in config.resources.apart
    for working in (None, *main):
        others = _others(config, main, working, is_cpu)
        if working is None:
            if generates_here:
                phases.append(_rollout(config, actor, others, device_bytes))
            continue
        if _forwards(config, working):
            phases.append(_forward(working, others, is_cpu))
        if working.learns:
            phases += [_update(working, others, is_cpu), _optimizer_step(working, others, is_cpu)]
    phases += _checkpoint(config, [role for role in main if role.learns], main, is_cpu)
    if not generates_here or config.rollout.own_processes:
        phases.append(_sync(main, actor, is_cpu))
    for role in roles:
        if role not in main:
            apart = [_forward(role, {}, is_cpu)]
            apart += [_update(role, {}, is_cpu), _optimizer_step(role, {}, is_cpu)] if role.learns else []
            phases += [dataclasses.replace(phase, phase=f"{phase.phase} (apart)") for phase in apart]
    if not generates_here:
        phases.append(_rollout_apart(config, actor, device_bytes))
    return phases


def least_bytes(config: Config, roles: Sequence[RolePlan], *, device_bytes: float | None) -> float:
    """Most of the phases whose memory is state alone: found without a trace, so that what is far too large costs no
    time."""
    main = [role for role in roles if role.name not in config.resources.apart]
    is_cpu = device_bytes is None
    states = [
        _optimizer_step(role, _others(config, main, role, is_cpu), is_cpu) for role in main if role.learns
    ]
    return max(phase.device_bytes for phase in states)


def _others(
    config: Config, main: Sequence[RolePlan], working: RolePlan | None, is_cpu: bool
) -> dict[str, float]:
    """Roles that are idle beside one that works."""
    return {
        f"{role.name}: idle": 0.0 if config.resources.offload_idle and not is_cpu else _idle(role, is_cpu)
        for role in main
        if role is not working
    }


def _load(main: Sequence[RolePlan]) -> PhaseMemory:
    """On a CPU, where device and host are one: the last of the models is whole, the others are sharded by then."""
    last = max(main, key=lambda role: load_host_bytes([role]))
    others = {f"{role.name}: weights": _worst(role).weights for role in main if role is not last}
    return PhaseMemory(phase="load", device={f"{last.name}: whole model": load_host_bytes([last]), **others})


def _forwards(config: Config, role: RolePlan) -> bool:
    from strop.trainer.role_columns import columns_before_updates

    if role.name != "actor":
        return True
    made = columns_before_updates(config, config.samples_per_step)
    return "old_log_probs" in made or ("ref_log_prob" in made and "reference" not in config.roles)


def _idle(role: RolePlan, is_cpu: bool) -> float:
    state = _worst(role)
    if role.engine.offload == "all" and not is_cpu:
        return 0.0
    if role.engine.offload == "optimizer" and not is_cpu:
        return state.weights
    return state.between


def _worst(role: RolePlan) -> Resident:
    """The stage with most state."""
    return max((resident(role, stage) for stage in _stages(role)), key=lambda state: state.between)


def _stages(role: RolePlan) -> Sequence[int]:
    last = role.axes.pipeline - 1
    return sorted({0, last // 2, last})


def _state(
    role: RolePlan, stage: int, is_cpu: bool, *, gradients: bool, optimizer: bool = True
) -> dict[str, float]:
    """State that is on the device while a role works."""
    state = resident(role, stage)
    if role.engine.offload == "all" and not is_cpu:
        return {}
    parts = {"weights": state.weights}
    if gradients:
        parts["gradients"] = state.gradients
    if role.learns and (is_cpu or role.engine.offload == "none" or optimizer):
        parts["optimizer"] = state.optimizer
    return parts


def _host(role: RolePlan, stage: int, is_cpu: bool, *, gradients: bool) -> dict[str, float]:
    """State that is on the host while a role works."""
    state = resident(role, stage)
    if is_cpu or role.engine.offload == "none":
        return {}
    parts = {"optimizer": state.optimizer}
    if role.engine.offload == "all":
        parts |= {"weights": state.weights, "gradients": state.gradients if gradients else 0.0}
    return parts


def _gathered(role: RolePlan, share: Share, *, backward: bool) -> dict[str, float]:
    """Parameters that sharded ranks gather for a pass, two layers at a time, and gradients on their way."""
    if not role.form.is_sharded:
        return {}
    item = role.form.compute_dtype.itemsize
    layers = 2 * share.largest_layer.total
    if not role.engine.reshard_after_forward:
        layers = share.gathered.total - share.root.total
    parts = {"gathered parameters": (layers + share.root.total) * item}
    if backward:
        unit = max(share.largest_layer.trained, share.root.trained)
        parts["gradients on their way"] = unit * (item + 4)
    return parts


def _forward(role: RolePlan, others: Mapping[str, float], is_cpu: bool) -> PhaseMemory:
    """A pass without gradient."""
    worst = None
    for stage in _stages(role):
        share = share_of(role.sizes, role.axes, role.engine, stage)
        parts = {
            **_state(role, stage, is_cpu, gradients=False),
            **_gathered(role, share, backward=False),
            "activations": role.passes.forward_bytes / role.axes.tensor,
            **others,
        }
        phase = PhaseMemory(
            phase=f"{role.name}: {'values' if role.form.has_value_head else 'log-probs'}",
            device=parts,
            host=_host(role, stage, is_cpu, gradients=False),
        )
        worst = phase if worst is None or phase.device_bytes > worst.device_bytes else worst
    assert worst is not None, "there is a stage"
    return worst


def _update(role: RolePlan, others: Mapping[str, float], is_cpu: bool) -> PhaseMemory:
    """Forward and backward passes of an optimizer step, at their most, on the stage with most."""
    phases = [_update_of_stage(role, stage, others, is_cpu) for stage in _stages(role)]
    return max(phases, key=lambda phase: phase.device_bytes)


def _update_of_stage(role: RolePlan, stage: int, others: Mapping[str, float], is_cpu: bool) -> PhaseMemory:
    share, axes, passes = share_of(role.sizes, role.axes, role.engine, stage), role.axes, role.passes
    num_batches = len(role.longest)
    in_flight = min(num_batches, axes.pipeline - stage)
    kinds = [passes.kinds[i] for i in share.layers]
    saved = float(sum(passes.layers[kind].saved_bytes for kind in kinds) * in_flight)
    saved += passes.saved_base_bytes * (in_flight if stage == 0 else 1)
    on_host = 0.0
    if not is_cpu and role.engine.offload_activations:
        saved, on_host = saved / max(1, len(kinds)), saved
    top = passes.top_bytes / axes.tensor
    if axes.tensor > 1 and not is_cpu:
        top = max(top, 1.5 * 4 * DEVICE_CHUNK_ELEMENTS)
    tail = passes.tail_bytes / axes.tensor
    state = _state(role, stage, is_cpu, gradients=False)
    moves = not is_cpu and role.engine.offload == "optimizer"
    if moves:
        state.pop("optimizer", None)  # on the host until the step
    gradients = resident(role, stage).gradients
    if role.form.is_sharded and num_batches > 1 and role.engine.gradient_sync == "last":
        gradients = share.gathered.trained * max(4, role.form.compute_dtype.itemsize)
    activations = {"activations": saved / axes.tensor, "head and one layer": top}
    if is_cpu:
        activations["gaps of the heap"] = HEAP_GAPS * (saved / axes.tensor + top)
    if num_batches == 1:  # gradients take the place of activations, layer by layer
        first, behind = sum(activations.values()), gradients + tail
        if role.engine.offload == "all" and not is_cpu:
            behind = tail
        activations = (
            activations if first >= behind else {"gradients": gradients, "embedding's gradient": tail}
        )
    elif not (role.engine.offload == "all" and not is_cpu):
        activations |= {"gradients": gradients}
    device = {**state, **activations, **_gathered(role, share, backward=True), **others}
    host = _host(role, stage, is_cpu, gradients=True)
    if on_host:
        host["activations"] = on_host / axes.tensor
    return PhaseMemory(phase=f"{role.name}: update", device=device, host=host)


def _optimizer_step(role: RolePlan, others: Mapping[str, float], is_cpu: bool) -> PhaseMemory:
    """All of the state, and nothing else."""
    stage = max(_stages(role), key=lambda stage: resident(role, stage).between)
    return PhaseMemory(
        phase=f"{role.name}: optimizer step",
        device={**_state(role, stage, is_cpu, gradients=True), **others},
        host=_host(role, stage, is_cpu, gradients=True),
    )


@dataclass(frozen=True, kw_only=True)
class CacheForm:
    """Keys and values of the sequences of one rank that generates."""

    slots: int
    tokens: int
    """Of a slot."""
    token_bytes: float

    @property
    def num_bytes(self) -> float:
        """Of the table."""
        return self.slots * self.tokens * self.token_bytes


def validates(config: Config) -> bool:
    """Prompts of validation are played, as many at once as may run: their number is not known here."""
    return bool(config.data.val_files)


def cache_form(
    config: Config, actor: RolePlan, ranks: int, *, tensor: int = 1, pipeline: int = 1
) -> CacheForm:
    """The table of keys and values of a rank that generates, when all answers are as long as they may be: those of a
    step, or of a validation.

    Args:
        config: of the run.
        actor: the policy.
        ranks: that generate.
        tensor, pipeline: of these, ranks that share heads, and layers, of the same sequences.
    """
    group = tensor * pipeline
    sequences = -(-config.samples_per_step * group // ranks)
    if validates(config):
        sequences = config.rollout.max_running * group
    longest = -(-(actor.lengths.prompt + actor.lengths.max_response) // GROW_TOKENS) * GROW_TOKENS
    sizes = actor.sizes
    heads, layers = max(1.0, sizes.key_heads / tensor), len(sizes.layers) / pipeline
    return CacheForm(
        slots=min(config.rollout.max_running * group, sequences),
        tokens=longest,
        token_bytes=2 * layers * heads * sizes.key_dim * actor.form.compute_dtype.itemsize,
    )


def _rollout(
    config: Config, actor: RolePlan, others: Mapping[str, float], device_bytes: float | None
) -> PhaseMemory:
    """Generation on the devices of the actor."""
    phase = _before_prefill(config, actor, others, device_bytes)
    if config.rollout.own_processes is not None:
        return phase
    axes = actor.axes
    cache = cache_form(config, actor, axes.world, tensor=axes.tensor, pipeline=axes.pipeline)
    prefill = _prefill_bytes(config, actor, cache, is_cpu=device_bytes is None)
    return dataclasses.replace(phase, device={**phase.device, "prefill and logits": prefill})


def _before_prefill(
    config: Config, actor: RolePlan, others: Mapping[str, float], device_bytes: float | None
) -> PhaseMemory:
    """Generation, without what needs a trace."""
    is_cpu, own = device_bytes is None, config.rollout.own_processes
    others = {name: size for name, size in others.items() if name != "actor: idle"}
    state = _state(actor, 0, is_cpu, gradients=False, optimizer=actor.engine.offload == "none")
    if config.resources.offload_idle and own and not is_cpu:
        state = {}
    if own is not None:
        device = {**state, **others}
        if device_bytes is not None:
            device[f"{config.rollout.engine} (its share of the device)"] = own.memory_share * device_bytes
        return PhaseMemory(phase="rollout", device=device)
    axes = actor.axes
    cache = cache_form(config, actor, axes.world, tensor=axes.tensor, pipeline=axes.pipeline)
    parts = {**state, **others, "keys and values": cache.num_bytes, **_generation_copies(actor, is_cpu)}
    return PhaseMemory(phase="rollout", device=parts, host=_host(actor, 0, is_cpu, gradients=False))


def _generation_copies(actor: RolePlan, is_cpu: bool) -> dict[str, float]:
    """Weights that are gathered, packed or rounded for generation."""
    sizes, item = actor.sizes, actor.form.compute_dtype.itemsize
    if actor.form.is_sharded:
        share = share_of(sizes, actor.axes, actor.engine, 0)
        if actor.axes.shards == 1 and item == actor.form.weights_dtype.itemsize:
            return {}
        return {"gathered parameters": share.gathered.total * item}
    if is_cpu and not actor.form.lora.enabled:
        return {"packed weights": sizes.linear * item + sizes.head_numbers * 4}
    if not is_cpu and item < 4:
        return {"weights in half precision": (sizes.linear + sizes.head_numbers) * item}
    return {}


def _prefill_bytes(config: Config, actor: RolePlan, cache: CacheForm, is_cpu: bool) -> float:
    """Of prompts that are computed together, their keys and values, and logits of the running sequences."""
    room = PREFILL_TOKENS if is_cpu else DEVICE_PREFILL_TOKENS
    prompts = min(config.data.prompts_per_step, max(1, room // actor.lengths.prompt))
    tokens = min(room, prompts * actor.lengths.prompt)
    each = max(1, tokens // prompts)
    segments = tuple(Segment(start=i * each, length=each) for i in range(prompts))
    passes = actor.traced(PackedShape(segments=segments, num_predicted=prompts), checkpointing=False)
    kept = config.data.prompts_per_step / actor.axes.data * actor.lengths.prompt * cache.token_bytes
    logits = cache.slots * actor.sizes.vocab * 4 * 2
    return (
        passes.forward_bytes / actor.axes.tensor
        + 2 * tokens * cache.token_bytes
        + min(kept, cache.num_bytes)
        + logits
    )


def _rollout_apart(config: Config, actor: RolePlan, device_bytes: float | None) -> PhaseMemory:
    """Generation on devices of its own."""
    ranks, is_cpu = config.resources.apart["rollout"], device_bytes is None
    sizes, item = actor.sizes, actor.form.compute_dtype.itemsize
    if (own := config.rollout.own_processes) is not None:
        weights = sizes.total * item / own.num_devices
        if device_bytes is None:
            return PhaseMemory(phase="rollout (apart)", device={"weights": weights})
        room = own.memory_share * device_bytes
        sequence = cache_form(config, actor, ranks, tensor=own.num_devices)
        least = sequence.tokens * sequence.token_bytes
        parts = {"weights": weights, "keys and values": max(least, room - weights)}
        if weights + least > room:
            parts[f"left free by {config.rollout.engine}"] = device_bytes - room
        return PhaseMemory(phase="rollout (apart)", device=parts)
    cache = cache_form(config, actor, ranks)
    wide = sizes.total - sizes.linear
    parts = {
        "weights": wide * 4 + sizes.linear * item,
        "keys and values": cache.num_bytes,
        "prefill and logits": _prefill_bytes(config, actor, cache, is_cpu),
        "buckets": float(min(NUM_SLOTS * BUCKET_BYTES, 2 * sizes.total * item)),
    }
    if is_cpu:
        parts |= _generation_copies(actor, is_cpu)
    return PhaseMemory(phase="rollout (apart)", device=parts)


def _sync(main: Sequence[RolePlan], actor: RolePlan, is_cpu: bool) -> PhaseMemory:
    """New weights on their way to engines with weights of their own."""
    item = actor.form.compute_dtype.itemsize
    buckets = float(min(NUM_SLOTS * BUCKET_BYTES, 2 * actor.sizes.total * item))
    largest = max(actor.sizes.head_numbers, *(part.all.total for part in actor.sizes.layers)) * 4
    state = {f"{role.name}: idle": _idle(role, is_cpu) for role in main}
    return PhaseMemory(
        phase="weight sync",
        device={**state, "buckets": buckets, "one weight, whole": largest},
        host={} if is_cpu else {"shared memory": buckets},
    )


def _checkpoint(
    config: Config, learners: Sequence[RolePlan], main: Sequence[RolePlan], is_cpu: bool
) -> list[PhaseMemory]:
    """The state is written from the device, or from a copy on the host; rank 0 gathers the policy for its folder."""
    state = {f"{role.name}: idle": _idle(role, is_cpu) for role in main}
    copies = sum(_worst(role).between for role in learners) if config.run.async_save else 0.0
    whole = 0.0
    if config.run.hf_model != "never" and learners and learners[0].form.is_sharded:
        whole = learners[0].sizes.total * learners[0].form.weights_dtype.itemsize
    parts = {"copy that is written": copies, "whole model on rank 0": whole}
    parts = {name: size for name, size in parts.items() if size}
    if is_cpu:
        return [PhaseMemory(phase="checkpoint", device={**state, **parts})]
    return [PhaseMemory(phase="checkpoint", device=state, host=parts)]


def load_host_bytes(roles: Sequence[RolePlan]) -> float:
    """Host memory of a process while it loads: a model for several ranks is whole in each until it is sharded."""
    return max(role.sizes.total * role.form.weights_dtype.itemsize for role in roles)
