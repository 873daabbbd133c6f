"""Configuration of generation during training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    samples_per_prompt: int = 8
    """Trajectories per prompt. Group-relative advantages need at least 2."""
    temperature: float = 1.0
    """Sampling temperature; the same value divides the logits when log-probs are recomputed."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability; 1 is off. Recorded log-probs stay those of
    the whole distribution, so that they can be compared with the trainer's."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the end-of-sequence tokens of the model folder."""
    max_running: int = 256
    """Sequences decoded together; more wait and enter as others finish."""
    timeout_s: float = 600.0
    """Wall-clock limit of one generation request, in seconds, the wait for a free place included."""

    def __post_init__(self) -> None:
        if self.samples_per_prompt < 1:
            raise ValueError(f"rollout.samples_per_prompt is {self.samples_per_prompt}; use at least 1")
        if self.temperature <= 0:
            raise ValueError(
                f"rollout.temperature is {self.temperature}, but training needs a value above 0: greedy "
                f"decoding has no sampling distribution. Use 1.0; for greedy evals set eval.temperature=0."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollout.top_p is {self.top_p}; use a probability in (0, 1], 1 for off")
        if self.top_k < 0:
            raise ValueError(f"rollout.top_k is {self.top_k}; use 0 for off")
        if self.max_running < 1:
            raise ValueError(f"rollout.max_running is {self.max_running}; use at least 1")
        if self.timeout_s <= 0:
            raise ValueError(f"rollout.timeout_s is {self.timeout_s}; use a number of seconds above 0")
