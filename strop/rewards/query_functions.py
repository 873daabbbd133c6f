"""Reward functions of OpenRLHF, which take whole sequences as text.

    def reward_func(queries, prompts, labels, **kwargs):
        return {"rewards": tensor, "scores": tensor, "extra_logs": {name: tensor}}

`prompts` are prompts as the model reads them, after the chat template; `queries` the same with the answer behind;
`labels` the right answers. A tensor or a list of rewards is an answer too. The lists have all answers to a prompt, as
in every form of lists.

This module runs in the reward's worker processes, under the same limits as a function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.rewards.functions import BadReturnError, RewardFunction
from strop.rewards.listed_functions import BatchFunction, call_with_accepted


@dataclass(frozen=True, kw_only=True)
class QueryFunction(BatchFunction):
    """A function of queries, prompts and labels."""

    tokenizer: Any = None
    """Of the policy; None where there is no model, and texts stand without their template."""

    def call_all(self, calls: Sequence[Mapping[str, Any]]) -> Any:
        """Call the function with queries, prompts and labels."""
        texts = [self._texts(call) for call in calls]
        labels = ["" if call["ground_truth"] is None else call["ground_truth"] for call in calls]
        prompts = [prompt for prompt, _ in texts]
        return call_with_accepted(
            self, {"queries": [a + b for a, b in texts], "prompts": prompts, "labels": labels}
        )

    def elements(self, returned: object, count: int) -> list[Any]:
        """Reward, scores and numbers to log of each of `count` answers.

        Raises:
            BadReturnError: there is not one reward for each in it.
        """
        if not isinstance(returned, Mapping):
            return self._each(returned, "returned", count)
        if "rewards" not in returned:
            raise BadReturnError(
                f'{self.label} returned a dictionary without "rewards"; this kind of function returns rewards, scores '
                f"and extra_logs"
            )
        parts = {"score": self._each(returned["rewards"], "returned rewards:", count)}
        if returned.get("scores") is not None:
            parts["scores"] = self._each(returned["scores"], "returned scores:", count)
        for name, value in (returned.get("extra_logs") or {}).items():
            if _has_no_axis(value):
                parts[str(name)] = [value] * count
            else:
                parts[str(name)] = self._each(value, f"returned {name}:", count)
        return [{name: values[number] for name, values in parts.items()} for number in range(count)]

    def _texts(self, call: Mapping[str, Any]) -> tuple[str, str]:
        if self.tokenizer is None or not call["prompt_ids"]:
            texts = [str(message.get("content") or "") for message in call["messages"]]
            return "\n\n".join(texts), call["solution_str"]
        prompt = self.tokenizer.decode(call["prompt_ids"], skip_special_tokens=False)
        ids = call["completion_ids"]
        answer = self.tokenizer.decode(ids, skip_special_tokens=False) if ids else call["solution_str"]
        return prompt, answer

    def _each(self, value: Any, verb: str, count: int) -> list[Any]:
        """The elements of a tensor or a list, one for each answer."""
        elements = value.reshape(-1).tolist() if hasattr(value, "tolist") else value
        if not isinstance(elements, list | tuple) or len(elements) != count:
            of = "one sample" if count == 1 else f"{count} samples"
            raise BadReturnError(f"{self.label} {verb} {value!r:.80} for {of}; it is one number per query")
        return list(elements)


def _has_no_axis(value: object) -> bool:
    return not hasattr(value, "__len__") or getattr(value, "shape", None) == ()


def of_queries(loaded: RewardFunction, setup: Mapping[str, Any]) -> RewardFunction:
    """A loaded function in this form.

    Args:
        loaded: the user's function.
        setup: as of `load_function`.
    """
    tokenizer = None
    if setup["tokenizer"]:
        from transformers import AutoTokenizer  # takes seconds

        tokenizer = AutoTokenizer.from_pretrained(setup["tokenizer"], trust_remote_code=False)
    return QueryFunction(**{**vars(loaded), "wants_conversation": True}, tokenizer=tokenizer)
