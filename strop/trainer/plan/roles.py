"""Roles of a run as the plan sees them: model, ranks, optimizer, and the micro-batches of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedConfig

from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.model import compute_dtype, load_model_config
from strop.trainer.config import Config, UpdateSettings
from strop.trainer.plan.batches import (
    Group,
    Lengths,
    groups_of,
    micro_batches_of,
    packed_shape,
    packed_tokens,
)
from strop.trainer.plan.parameters import Axes, ModelSizes, model_sizes
from strop.trainer.plan.passes import PackedShape, Passes, PassForm, trace_passes

LEARNERS = ("actor", "critic", "prm")
VALUE_MODELS = ("critic", "reward_model")


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """A role with a model."""

    name: str
    shape: PreTrainedConfig
    form: PassForm
    engine: EngineConfig
    axes: Axes
    optim: OptimizerConfig | None
    """None of a frozen model."""
    lengths: Lengths
    num_groups: int
    """Of a step; those of a full update are fewer by `updates`."""
    group_size: int
    updates: int
    """Optimizer steps on the samples of a step, without epochs."""
    epochs: int

    @property
    def learns(self) -> bool:
        """It has an optimizer."""
        return self.optim is not None

    @cached_property
    def sizes(self) -> ModelSizes:
        """Its parameters."""
        return _sized(self.shape, self.form)

    @cached_property
    def longest(self) -> list[list[Group]]:
        """Micro-batches of a rank in an update whose answers are all as long as they may be."""
        return self.micro_batches(dataclasses.replace(self.lengths, mean_response=self.lengths.max_response))

    @cached_property
    def usual(self) -> list[list[Group]]:
        """Micro-batches of a rank in an update, by the distribution of lengths."""
        return self.micro_batches(self.lengths)

    def micro_batches(self, lengths: Lengths) -> list[list[Group]]:
        """Of a rank in an update."""
        ranks, groups = self.axes.data, max(1, self.num_groups // self.updates)
        size = self.group_size
        if groups < ranks:  # groups are cut
            size = max(1, -(-groups * size // ranks))
            groups = ranks
        groups = -(-groups // ranks)
        every = groups_of(lengths, num_groups=groups, group_size=size)
        return micro_batches_of(every, max_tokens=self.budget)

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch, over the ranks that share each sequence."""
        return self.engine.max_tokens_per_device * self.axes.sequence * self.axes.context

    @cached_property
    def passes(self) -> Passes:
        """Passes over the largest micro-batch that answers of full length make."""
        return traced(self.shape, self.form, self.on_rank(self.longest[0]))

    @cached_property
    def usual_passes(self) -> Passes:
        """Passes over a micro-batch of usual lengths, of the middle size."""
        if self.usual[0] == self.longest[0]:
            return self.passes
        return traced(self.shape, self.form, self.on_rank(self.usual[len(self.usual) // 2]))

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


_TRACES: dict[tuple[str, PassForm, PackedShape], Passes] = {}
_SIZES: dict[tuple[str, PassForm], ModelSizes] = {}


def traced(shape: PreTrainedConfig, form: PassForm, batch: PackedShape) -> Passes:
    """As `trace_passes`; a search asks for few different ones, many times."""
    key = (shape.to_json_string(), form, batch)
    if key not in _TRACES:
        _TRACES[key] = trace_passes(shape, form, batch)
    return _TRACES[key]


def _sized(shape: PreTrainedConfig, form: PassForm) -> ModelSizes:
    """As `model_sizes`, whatever the form of passes."""
    key = (shape.to_json_string(), dataclasses.replace(form, is_sharded=False, checkpointing=False))
    if key not in _SIZES:
        _SIZES[key] = model_sizes(shape, form)
    return _SIZES[key]


def planned_roles(
    config: Config, lengths: Lengths, *, is_accelerator: bool, world: int | None = None
) -> list[RolePlan]:
    """The roles of a run that have a model, the policy first.

    Args:
        config: of the run.
        lengths: of prompts and answers.
        is_accelerator: the roles run on one; a CPU otherwise.
        world: ranks of the main pool; None: as the configuration says.

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
        ranks = config.resources.apart.get(name) or world or config.resources.ranks
        settings, optim = learners.get(name, (config.actor, None))
        lora = {"actor": config.model.lora, "critic": config.critic.lora}.get(name, LoraConfig())
        roles.append(
            RolePlan(
                name=name,
                shape=_shape(model),
                form=_form(model, name, lora, device=device, ranks=ranks),
                engine=engine,
                axes=Axes.of(engine, ranks),
                optim=optim,
                lengths=lengths,
                num_groups=config.data.prompts_per_step,
                group_size=config.rollout.samples_per_prompt,
                updates=-(-config.samples_per_step // config.samples_per_update(settings)),
                epochs=settings.epochs,
            )
        )
    return roles


def _shape(model: ModelConfig) -> PreTrainedConfig:
    return load_model_config(model)


def _form(model: ModelConfig, name: str, lora: LoraConfig, *, device: torch.device, ranks: int) -> PassForm:
    dtype = compute_dtype(model, device)
    return PassForm(
        compute_dtype=dtype,
        weights_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        is_sharded=ranks > 1,
        is_accelerator=device.type != "cpu",
        checkpointing=model.gradient_checkpointing and name in LEARNERS,
        has_value_head=name in VALUE_MODELS,
        lora=lora,
        by_formula=model.attn_implementation == "eager",
    )
