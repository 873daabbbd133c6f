"""Reward functions of OpenRLHF, which are given whole sequences as text.

    def reward_func(queries, prompts, labels, **kwargs):
        return {"rewards": tensor, "scores": tensor, "extra_logs": {name: tensor}}

`prompts` are prompts as the model reads them, after the chat template; `queries` the same with the answer behind;
`labels` the right answers. A tensor or a list of rewards is an answer too. Each list has one element, as in every form
of lists.

This module runs in the reward's worker processes, under the same limits as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from strop.compat.listed_rewards import called
from strop.rewards.combining import Part
from strop.rewards.functions import BadReturnError, RewardFunction


@dataclass(frozen=True, kw_only=True)
class QueryFunction(RewardFunction):
    """A function of queries, prompts and labels."""

    tokenizer: Any = None
    """Of the policy; None where there is no model, and texts stand without their template."""

    def __call__(self, call: Mapping[str, Any]) -> Any:
        prompt, answer = self._texts(call)
        label = "" if call["ground_truth"] is None else call["ground_truth"]
        return called(self, {"queries": [prompt + answer], "prompts": [prompt], "labels": [label]})

    def read(self, returned: Any) -> Part:
        """Reward, scores and numbers to log of what it returned.

        Raises:
            BadReturnError: there is no reward for one sample in it.
        """
        if not isinstance(returned, Mapping):
            return super().read(self._only(returned, "returned"))
        if "rewards" not in returned:
            raise BadReturnError(
                f'{self.label} returned a dictionary without "rewards"; this kind of function returns rewards, scores '
                f"and extra_logs"
            )
        parts = {"score": self._only(returned["rewards"], "returned rewards:")}
        if returned.get("scores") is not None:
            parts["scores"] = self._only(returned["scores"], "returned scores:")
        for name, value in (returned.get("extra_logs") or {}).items():
            parts[str(name)] = value if _has_no_axis(value) else self._only(value, f"returned {name}:")
        return super().read(parts)

    def _texts(self, call: Mapping[str, Any]) -> tuple[str, str]:
        if self.tokenizer is None or not call["prompt_ids"]:
            texts = [str(message.get("content") or "") for message in call["messages"]]
            return "\n\n".join(texts), call["solution_str"]
        prompt = self.tokenizer.decode(call["prompt_ids"], skip_special_tokens=False)
        ids = call["completion_ids"]
        answer = self.tokenizer.decode(ids, skip_special_tokens=False) if ids else call["solution_str"]
        return prompt, answer

    def _only(self, value: Any, verb: str) -> Any:
        """The one element of a tensor or a list."""
        listed = value.reshape(-1).tolist() if hasattr(value, "tolist") else value
        if not isinstance(listed, list | tuple) or len(listed) != 1:
            raise BadReturnError(
                f"{self.label} {verb} {value!r:.80} for one sample; it is one number per query"
            )
        return listed[0]


def _has_no_axis(value: Any) -> bool:
    return not hasattr(value, "__len__") or getattr(value, "shape", None) == ()


def of_queries(
    function: Callable[..., Any], loaded: RewardFunction, setup: Mapping[str, Any]
) -> RewardFunction:
    """A loaded function in this form.

    Args:
        function: the user's.
        loaded: the same as the core sees it.
        setup: as of `load_function`.
    """
    tokenizer = None
    if setup["tokenizer"]:
        from transformers import AutoTokenizer  # takes seconds

        tokenizer = AutoTokenizer.from_pretrained(setup["tokenizer"], trust_remote_code=False)
    return QueryFunction(**{**vars(loaded), "wants_conversation": True}, tokenizer=tokenizer)
