"""Roles of a run as the plan sees them: model, ranks, optimizer, and the micro-batches of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from transformers import PreTrainedConfig

from strop.engines.causal_lm import HALF
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.model_support.unsupported import check_family
from strop.engines.multimodal.inputs import language_model_class
from strop.engines.precision import compute_dtype
from strop.engines.pretrained_config import load_model_config
from strop.trainer.config import Config, UpdateSettings
from strop.trainer.plan.batches import (
    Group,
    Lengths,
    groups_of,
    micro_batches_of,
    packed_shape,
    packed_tokens,
)
from strop.trainer.plan.meta_model import PassForm
from strop.trainer.plan.parameters import Axes, ModelSizes, Share, model_sizes, share_of
from strop.trainer.plan.passes import PackedShape, Passes, trace_forward_bytes, trace_passes
from strop.trainer.plan.unsaid_sizes import unsaid_sizes

LEARNERS = ("actor", "critic", "prm")
ALGORITHM = ("actor", "critic")
"""Of these, the ones that learn from the samples that the algorithm keeps."""
VALUE_MODELS = ("critic", "reward_model")
PRM_COPY = "prm_ref"
"""The process reward model as it began, beside the one that learns (workers/prm.py)."""
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "intermediate_size",
    "head_dim",
)
"""Settings of a config.json that no model can be made of below 1, and that transformers takes."""
LEAST_GROUPS, FULL_BATCHES = 4, 4
"""Groups of usual lengths that a micro-batch is chosen from, at least, and in micro-batches that they fill."""


@dataclass(frozen=True)
class Shape:
    """A model's config.json, compared by its text, so that what is computed from it is kept."""

    text: str
    config: PreTrainedConfig = field(compare=False)
    unsaid: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Sizes that it does not say, with the values that were taken."""


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """A role with a model."""

    name: str
    held_by: str
    """Role of the run whose processes hold it: those of a process reward model have a frozen copy beside it."""
    shape: Shape
    form: PassForm
    engine: EngineConfig
    axes: Axes
    optim: OptimizerConfig | None
    """None of a frozen model."""
    lengths: Lengths
    num_samples: int
    """Of a step; those of an optimizer step are fewer by `updates`."""
    group_size: int
    """Samples of a prompt."""
    num_kept: int
    """Of these, that are trained on (algorithm.keep.best)."""
    updates: int
    """Optimizer steps on the samples of a step, without epochs."""
    epochs: int

    def placed(self, ranks: int, *, checkpointing: bool, **axes: object) -> RolePlan:
        """The same role on so many ranks, as `planned_roles` has it with these values of its engine."""
        engine = dataclasses.replace(self.engine, **axes)  # type: ignore[arg-type]  # fields of the engine
        form = dataclasses.replace(
            self.form, is_sharded=ranks > 1, checkpointing=checkpointing and self.name in LEARNERS
        )
        return dataclasses.replace(self, engine=engine, axes=Axes.of(engine, ranks), form=form)

    def alone(self) -> RolePlan:
        """The same model in processes that only generate: whole in each, its adapter merged, rounded as it is read."""
        engine = dataclasses.replace(
            self.engine, tensor_parallel=1, sequence_parallel=1, context_parallel=1, pipeline_parallel=1,
            pipeline_layers=(), expert_parallel=1, shard_size=0,
        )  # fmt: skip
        form = dataclasses.replace(
            self.form, is_sharded=False, checkpointing=False, lora=LoraConfig(),
            holds_half=self.form.compute_dtype in HALF,
        )  # fmt: skip
        return dataclasses.replace(self, engine=engine, axes=Axes(), form=form, optim=None)

    @property
    def learns(self) -> bool:
        """It has an optimizer."""
        return self.optim is not None

    @cached_property
    def sizes(self) -> ModelSizes:
        """Its parameters."""
        plain = dataclasses.replace(
            self.form,
            is_sharded=False,
            checkpointing=False,
            holds_half=False,
            by_formula=False,
            takes_entropy=False,
        )
        return _sized(self.shape, plain)

    def share(self, stage: int) -> Share:
        """The parameters of a rank of a stage."""
        if stage not in self._shares:
            self._shares[stage] = share_of(self.sizes, self.axes, self.engine, stage)
        return self._shares[stage]

    @cached_property
    def _shares(self) -> dict[int, Share]:
        return {}

    @property
    def num_trained(self) -> int:
        """Samples of a step that are trained on."""
        return self.num_samples // self.group_size * self.num_kept

    @property
    def samples_of_update(self) -> int:
        """Samples of the largest optimizer step."""
        return -(-self.num_trained // self.updates)

    @cached_property
    def longest(self) -> Batches:
        """Micro-batches of a rank in an update whose answers are all as long as they may be."""
        return self.micro_batches(self._full_lengths, self.samples_of_update, of_prompt=self.num_kept)

    @cached_property
    def usual(self) -> Batches:
        """Micro-batches of a rank in an update, by the distribution of lengths."""
        return self.micro_batches(self.lengths, self.samples_of_update, of_prompt=self.num_kept)

    @property
    def _full_lengths(self) -> Lengths:
        return dataclasses.replace(self.lengths, mean_response=self.lengths.max_response)

    def micro_batches(self, lengths: Lengths, num_samples: int, *, of_prompt: int) -> Batches:
        """Of a rank that has its part of so many samples, of which a prompt has so many: it is there once for those of
        its samples that are there.

        Raises:
            ValueError: a sequence is longer than the budget.
        """
        if lengths.longest > self.budget:
            raise ValueError(
                f"a sequence of {lengths.longest} tokens is above {self.held_by}.engine.max_tokens_per_device of "
                f"{self.engine.max_tokens_per_device}{self._sharing}: raise it, or lower data.max_prompt_tokens or "
                f"data.max_response_tokens"
            )
        return _cut(lengths, -(-num_samples // self.axes.data), of_prompt, self.budget)

    @property
    def _sharing(self) -> str:
        """Ranks that share a sequence, in words."""
        shared = self.axes.sequence * self.axes.context
        return f" on each of the {shared} that share it" if shared > 1 else ""

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch, over the ranks that share each sequence."""
        return self.engine.max_tokens_per_device * self.axes.sequence * self.axes.context

    @cached_property
    def largest_batch(self) -> PackedShape:
        """The largest micro-batch that answers of full length make."""
        return self.on_rank(_largest(self.longest))

    @cached_property
    def passes(self) -> Passes:
        """Passes over it."""
        return self.traced(self.largest_batch)

    @cached_property
    def forward_bytes(self) -> int:
        """Most bytes of a pass without a gradient over the same of all samples of a step."""
        batches = self.micro_batches(self._full_lengths, self.num_samples, of_prompt=self.group_size)
        return self.traced_forward_bytes(self.on_rank(_largest(batches)))

    @cached_property
    def usual_batch(self) -> PackedShape:
        """A micro-batch of whole groups of usual lengths, of the middle size. Of a share of a group, or of many groups,
        the work follows from this one, so that a search over numbers of ranks needs no other."""
        enough = max(LEAST_GROUPS, FULL_BATCHES * self.budget // self.lengths.longest)
        num_samples = min(enough * self.num_kept, self.samples_of_update)
        batches = _cut(self.lengths, num_samples, self.num_kept, self.budget)
        are_alike = self.lengths.quantiles(2)[0] == self.lengths.max_response
        return self.on_rank(batches[0 if are_alike else len(batches) // 2])

    def small_batch(self, most_tokens: int) -> PackedShape:
        """The same, or one of so many tokens that is like it."""
        if self.usual_batch.num_tokens <= most_tokens:
            return self.usual_batch
        prompt = min(self.lengths.prompt, max(1, most_tokens // 2))
        answer = max(2, min(round(self.lengths.mean_response), most_tokens - prompt))
        group = prompt, (answer,) * min(self.num_kept, max(1, (most_tokens - prompt) // answer))
        return packed_shape([group] * max(1, most_tokens // packed_tokens(group)))

    @cached_property
    def usual_passes(self) -> Passes:
        """Passes over it."""
        return self.traced(self.usual_batch)

    def traced(self, batch: PackedShape) -> Passes:
        """Passes over a micro-batch."""
        return _traced(self.shape, self.form, batch)

    def traced_forward_bytes(self, batch: PackedShape) -> int:
        """Most bytes of a pass without a gradient over a micro-batch; layers are not computed again in it."""
        return _traced_forward_bytes(self.shape, dataclasses.replace(self.form, checkpointing=False), batch)

    @property
    def usual_tokens(self) -> list[int]:
        """Tokens of the usual micro-batches of an update, on a rank."""
        shared = self.axes.sequence * self.axes.context
        return [sum(map(packed_tokens, batch)) // shared for batch in self.usual]

    def on_rank(self, batch: Sequence[Group]) -> PackedShape:
        """A micro-batch as a rank has it where several share each sequence."""
        shared = self.axes.sequence * self.axes.context
        if shared > 1:
            batch = [
                (-(-p // shared), tuple(max(2, -(-a // shared)) for a in answers)) for p, answers in batch
            ]
        return packed_shape(batch)


Batches = tuple[tuple[Group, ...], ...]
"""Micro-batches, each of some groups."""


def _largest(batches: Batches) -> Sequence[Group]:
    """That with most tokens."""
    return max(batches, key=lambda batch: sum(map(packed_tokens, batch)))


@lru_cache(maxsize=1024)
def _cut(lengths: Lengths, num_samples: int, group_size: int, max_tokens: int) -> Batches:
    """Micro-batches of groups; the role says before whether each sequence fits."""
    groups = groups_of(lengths, num_samples=num_samples, group_size=group_size)
    return tuple(map(tuple, micro_batches_of(groups, max_tokens=max_tokens)))


@lru_cache(maxsize=512)
def _traced(shape: Shape, form: PassForm, batch: PackedShape) -> Passes:
    """As `trace_passes`; a search asks for few different ones, many times."""
    return trace_passes(shape.config, form, batch)


@lru_cache(maxsize=512)
def _traced_forward_bytes(shape: Shape, form: PassForm, batch: PackedShape) -> int:
    """As `trace_forward_bytes`."""
    return trace_forward_bytes(shape.config, form, batch)


@lru_cache(maxsize=64)
def _sized(shape: Shape, form: PassForm) -> ModelSizes:
    """As `model_sizes`."""
    return model_sizes(shape.config, form)


def shapes_of(roles: Sequence[RolePlan]) -> dict[str, Shape]:
    """The models of roles, by the names of these."""
    return {role.name: role.shape for role in roles}


def planned_roles(
    config: Config,
    lengths: Lengths,
    *,
    is_accelerator: bool,
    shapes: Mapping[str, Shape] | None = None,
) -> list[RolePlan]:
    """The roles of a run that have a model, the policy first.

    Args:
        config: of the run.
        lengths: of prompts and answers.
        is_accelerator: the roles run on one; a CPU otherwise.
        shapes: of the models by role, where they are known; None: each config.json is read.

    Raises:
        ValueError: a model has no config.json, or is of a family that cannot be planned.
    """
    paths = {
        "actor": config.model.path,
        "reference": config.reference.path,
        "critic": config.critic.path,
        "teacher": config.teacher.path,
        "prm": config.prm.path,
        "reward_model": config.reward_model.path,
    }
    learners: dict[str, tuple[UpdateSettings, OptimizerConfig]] = {
        "actor": (config.actor, config.actor.optim),
        "critic": (config.critic, config.critic.optim),
        "prm": (config.prm, config.prm.optim),
    }
    device = torch.device("cuda" if is_accelerator else "cpu")
    roles = []
    for name, engine in config.used_engines.items():
        model = dataclasses.replace(config.model, path=paths[name] or config.model.path)
        if name in ("teacher", "reward_model"):
            model = dataclasses.replace(model, dtype=getattr(config, name).dtype)
        ranks = config.resources.ranks_of(name)
        settings, optim = learners.get(name, (config.actor, None))
        lora = {"actor": config.model.lora, "critic": config.critic.lora}.get(name, LoraConfig())
        shape = _shape(model, has_value_head=name in VALUE_MODELS) if shapes is None else shapes[name]
        form = _form(model, name, lora, shape, device=device, ranks=ranks)
        if name == "actor" and config.algorithm.entropy_coeff:
            form = dataclasses.replace(form, takes_entropy=True)
        of_prompt = config.rollout.samples_per_prompt
        num_kept = min(of_prompt, config.algorithm.keep.best or of_prompt) if name in ALGORITHM else of_prompt
        num_trained = config.data.prompts_per_step * num_kept
        role = RolePlan(
            name=name,
            held_by=name,
            shape=shape,
            form=form,
            engine=engine,
            axes=Axes.of(engine, ranks),
            optim=optim,
            lengths=lengths,
            num_samples=config.samples_per_step,
            group_size=of_prompt,
            num_kept=num_kept,
            updates=-(-num_trained // config.samples_per_update(settings)),
            epochs=settings.epochs,
        )
        roles.append(role)
        if name == "prm":
            frozen = _form(model, PRM_COPY, lora, shape, device=device, ranks=ranks)
            roles.append(dataclasses.replace(role, name=PRM_COPY, form=frozen, optim=None))
    return roles


def _shape(model: ModelConfig, *, has_value_head: bool) -> Shape:
    config = load_model_config(model)
    text = config.get_text_config()
    for name in SIZES:
        size = getattr(text, name, None)
        if isinstance(size, int) and size < 1:
            raise ValueError(
                f"model {model.path!r} has a {name} of {size} in its config.json: it is at least 1"
            )
    heads, key_heads = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(key_heads, int) and heads % key_heads:
        raise ValueError(
            f"model {model.path!r} has num_attention_heads of {heads} and num_key_value_heads of {key_heads} in its "
            f"config.json: the second must divide the first"
        )
    if not has_value_head:
        check_family(config, language_model_class(config), model.path)
    return Shape(config.to_json_string(), config, unsaid_sizes(model, config))


def _form(
    model: ModelConfig, name: str, lora: LoraConfig, shape: Shape, *, device: torch.device, ranks: int
) -> PassForm:
    dtype = compute_dtype(model, device)
    is_lossless = lora.enabled and getattr(shape.config, "dtype", None) == dtype  # of the folder's weights
    return PassForm(
        compute_dtype=dtype,
        weights_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        is_sharded=ranks > 1,
        is_accelerator=device.type != "cpu",
        checkpointing=model.gradient_checkpointing and name in LEARNERS,
        has_value_head=name in VALUE_MODELS,
        lora=lora,
        holds_half=dtype in HALF and (name not in LEARNERS or is_lossless),
        by_formula=model.attn_implementation == "eager",
    )
