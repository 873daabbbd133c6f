"""Reward managers of verl: classes that score a row of a batch instead of a text.

    from strop.rewards.managers import RewardManagerBase, register

    @register("mine")
    class MyManager(RewardManagerBase):
        async def run_single(self, data):
            row = data[0]
            text = self.tokenizer.decode(row.batch["responses"], skip_special_tokens=True)
            return {"reward_score": float(len(text)), "reward_extra_info": {"length": len(text)}}

The older form is a class called as `manager(data, return_dict=True)`, which returns a tensor of rewards per token
[1, R], or a dictionary with it under `reward_tensor` and lists under `reward_extra_info`. The reward is its sum, and
each token keeps its own for estimators that take rewards per token.

A batch has one row: prompts [1, P], responses [1, R], input_ids and attention_mask [1, P + R], position_ids [1, P + R]
and response_mask [1, R] (1: sampled, 0: of a tool or an environment), without padding; beside them data_source,
reward_model (with ground_truth), extra_info, uid, raw_prompt, __num_turns__, and the other columns of the row.

This module runs in the reward's worker processes, under the same limits as a function. It needs torch, so they start
more slowly than those of a function.
"""

from __future__ import annotations

import abc
import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import torch
from transformers import AutoTokenizer

from strop.protocol import DataProto
from strop.rewards.combine import Part
from strop.rewards.functions import BadReturnError, LoadError, RewardFunction, load_module
from strop.rewards.scorers import default_compute_score
from strop.utils.sanitize.values import MAX_NUMBER

C = TypeVar("C", bound=type)
registered: dict[str, type] = {}
"""Managers by the name they were registered with."""


def register(name: str) -> Callable[[C], C]:
    """Give a manager a name that reward.manager may use."""

    def add(manager: C) -> C:
        if name in registered and registered[name].__qualname__ != manager.__qualname__:
            raise ValueError(f"reward manager {name!r} is already registered: {registered[name]!r}")
        registered[name] = manager
        return manager

    return add


class Settings(dict[str, Any]):
    """A dictionary whose entries are attributes too: the configuration of managers."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError as error:
            raise AttributeError(
                f"the configuration of a reward manager has no {name!r}; it has {', '.join(self)} (set others as "
                f"reward.kwargs)"
            ) from error
        return Settings(value) if isinstance(value, dict) else value


class RewardManagerBase(abc.ABC):
    """Scores one row at a time."""

    _is_class_ready: ClassVar[bool] = False

    def __init__(
        self,
        config: object,
        tokenizer: Any,
        compute_score: Callable[..., Any] | None = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: object = None,
    ) -> None:
        """Args:
        config: reward.kwargs, also as `config.reward.reward_kwargs`.
        tokenizer: of the policy.
        compute_score: the function `reward.name` of the same file, else the built-in scorers.
        reward_router_address, reward_model_tokenizer: None; ask a service through reward.server instead.
        """
        self.config, self.tokenizer = config, tokenizer
        self.compute_score = compute_score or default_compute_score
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)
        self.reward_router_address, self.reward_model_tokenizer = (
            reward_router_address,
            reward_model_tokenizer,
        )
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: object, tokenizer: Any) -> None:
        """Called as the manager is made; a subclass sets up what all calls share."""
        cls._is_class_ready = True

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that runs `run_single`."""
        return asyncio.get_running_loop()

    @abc.abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """`reward_score`, a number, and `reward_extra_info`, named values, of a batch of one row."""


@dataclass(frozen=True, kw_only=True)
class ManagerFunction(RewardFunction):
    """A manager that is called like a reward function."""

    tokenizer: Any = None

    def __call__(self, call: Mapping[str, Any]) -> Any:
        return self.function(batch_of(call, self.tokenizer))

    def read(self, returned: object) -> Part:
        """Score and parts of what either form returns.

        Raises:
            BadReturnError: it is neither.
        """
        extra: Mapping[str, Any] = {}
        token_rewards: list[tuple[int, float]] = []
        if isinstance(returned, Mapping) and "reward_score" in returned:
            score, extra = returned["reward_score"], returned.get("reward_extra_info") or {}
        elif isinstance(returned, Mapping) and "reward_tensor" in returned:
            score, token_rewards = _of_tokens(returned["reward_tensor"])
            extra = {name: _only(value) for name, value in (returned.get("reward_extra_info") or {}).items()}
        elif isinstance(returned, torch.Tensor):
            score, token_rewards = _of_tokens(returned)
        else:
            raise BadReturnError(
                f"{self.label} returned a {type(returned).__name__}; a manager returns a dictionary with reward_score "
                f"(run_single), or a tensor or a dictionary with reward_tensor (__call__)"
            )
        return replace(super().read({**extra, "score": score}), token_rewards=token_rewards)


def _of_tokens(rewards: object) -> tuple[float, list[tuple[int, float]]]:
    """The sum of the rewards of tokens, and those that are not 0; none where all of it is on the last token."""
    if not isinstance(rewards, torch.Tensor) or rewards.ndim != 2 or len(rewards) != 1:
        raise BadReturnError(
            f"the tensor of rewards must be [1, R] for a batch of one row, got {rewards!r:.100}"
        )
    values = rewards[0].double()
    strange = values[~(values.abs() <= MAX_NUMBER)]  # also what is no number
    if len(strange):
        raise BadReturnError(
            f"the tensor of rewards has {float(strange[0]):g} in it; give finite numbers from {-MAX_NUMBER:g} to "
            f"{MAX_NUMBER:g}"
        )
    places = values.nonzero()[:, 0].tolist()
    is_outcome = places in ([], [len(values) - 1])
    return float(values.sum()), [] if is_outcome else [(place, float(values[place])) for place in places]


def _only(value: object) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def batch_of(call: Mapping[str, Any], tokenizer: Any) -> DataProto:
    """A call of the reward pool as a batch of one row; texts without token ids are encoded."""
    prompt = list(call["prompt_ids"])
    response, mask = list(call["completion_ids"]), list(call["response_mask"])
    if not response:
        response = list(tokenizer(call["solution_str"], add_special_tokens=False)["input_ids"])
        mask = [1] * len(response)
    prompts = torch.tensor([prompt], dtype=torch.int64)
    responses = torch.tensor([response], dtype=torch.int64).reshape(1, len(response))
    input_ids = torch.cat([prompts, responses], dim=1)
    columns = {
        **call["columns"],
        "data_source": call["data_source"],
        "reward_model": {"style": "rule", "ground_truth": call["ground_truth"]},
        "extra_info": call["extra_info"],
        "uid": call["uid"],
        "raw_prompt": call["messages"],
        "__num_turns__": call["extra_info"].get("num_turns", 2),
    }
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "position_ids": torch.arange(input_ids.shape[1]).unsqueeze(0),
            "response_mask": torch.tensor([mask], dtype=torch.int64).reshape(1, len(response)),
        },
        non_tensors={name: [value] for name, value in columns.items()},
    )


def load_manager(setup: Mapping[str, Any]) -> RewardFunction:
    """The manager of a file, ready to be called.

    Args:
        setup: path, source, name, kwargs, manager (its class or registered name) and tokenizer (a folder).

    Raises:
        LoadError: the file has no such class, or it cannot be made.
    """
    module = load_module(setup["path"], setup["source"])
    manager = registered.get(setup["manager"]) or getattr(module, setup["manager"], None)
    if not inspect.isclass(manager):
        classes = [
            name for name, value in vars(module).items() if inspect.isclass(value) and _is_own(module, value)
        ]
        raise LoadError(
            f"reward file {setup['path']} has no class and registers no manager {setup['manager']!r}: it defines "
            f"{', '.join(sorted({*classes, *registered})) or 'none'}; set reward.manager"
        )
    tokenizer = AutoTokenizer.from_pretrained(setup["tokenizer"], trust_remote_code=False)
    instance = _make(manager, setup, tokenizer, getattr(module, setup["name"], default_compute_score))
    call = instance.run_single if hasattr(instance, "run_single") else _call_form(instance)
    label = f"{setup['manager']} in {setup['path'].rpartition('/')[2]}"
    return ManagerFunction(
        function=call, label=label, wants_conversation=True, path=setup["path"], tokenizer=tokenizer
    )


def _is_own(module: ModuleType, value: type) -> bool:
    return value.__module__ == module.__name__


def _make(manager: type, setup: Mapping[str, Any], tokenizer: Any, compute_score: object) -> Any:
    """The manager, made with what its constructor names."""
    kwargs = dict(setup["kwargs"])
    offered = {
        "config": Settings({**kwargs, "reward": {"reward_kwargs": kwargs}}),
        "tokenizer": tokenizer, "compute_score": compute_score, "num_examine": 0, "reward_fn_key": "data_source",
        "reward_router_address": None, "reward_model_tokenizer": None, **kwargs,
    }  # fmt: skip
    parameters = inspect.signature(manager).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}
    accepted = names | {"config"} if takes_any else names
    refused = set() if takes_any or "config" in names else kwargs.keys() - names
    if refused:
        raise LoadError(
            f"reward.kwargs has {', '.join(sorted(refused))}, which {manager.__name__} does not take"
        )
    arguments = {
        name: value for name, value in offered.items() if name in accepted or (takes_any and name in kwargs)
    }
    try:
        return manager(**arguments)
    except Exception as error:  # the constructor is the user's; its failure becomes one sentence
        raise LoadError(
            f"{manager.__name__} in reward file {setup['path']} cannot be made: {type(error).__name__}: {error}"
        ) from error


def _call_form(manager: object) -> Callable[[DataProto], Any]:
    """A manager of the older form, called as `manager(data, return_dict=True)`."""
    if not callable(manager):
        raise LoadError(
            f"{type(manager).__name__} has neither run_single(data) nor __call__(data), so it is no reward manager"
        )
    parameters = inspect.signature(manager).parameters
    return (lambda data: manager(data, return_dict=True)) if "return_dict" in parameters else manager
