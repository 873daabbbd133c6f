"""Tasks of the reasoning-gym package as an environment: the seed makes the task, the package scores the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class ReasoningGymEnvironment:
    """One question per episode; further tries where `max_tries` allows them.

    Tasks whose scorer of the package evaluates the answer as a program are refused: give their rows to
    single_turn_agent, whose scorer makes them harmless.
    """

    EVALUATING = frozenset({
        "binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "intermediate_integration",
        "polynomial_multiplication", "puzzle24", "simple_integration",
    })  # fmt: skip
    """Tasks whose scorer calls eval or a parser that does."""

    def __init__(self, task: str, *, max_tries: int = 1, **settings: Any) -> None:
        """Args:
        task: of reasoning-gym, such as chain_sum.
        max_tries: answers in one episode; it ends with the first right one.
        settings: of the task.

        Raises:
            ValueError: there is no such task, or it cannot be used.
        """
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ModuleNotFoundError as error:
            raise ValueError(
                "environment reasoning_gym needs the reasoning-gym package: pip install 'strop[reasoning-gym]'"
            ) from error
        if task not in DATASETS:
            raise ValueError(f"the reasoning-gym package has no task {task!r}")
        if task in self.EVALUATING:
            raise ValueError(
                f"the scorer of the reasoning-gym task {task!r} evaluates the answer as a program, so it cannot be an "
                f"environment: use rows of examples/reasoning_gym/prepare.py with single_turn_agent"
            )
        self._make: Callable[..., Any] = reasoning_gym.create_dataset
        self._task, self._settings, self._max_tries = task, settings, max_tries
        self._tries = 0
        self._data: Any = None
        self._entry: dict[str, Any] = {}

    def reset(self, seed: int, row: Mapping[str, Any]) -> str:
        """As of Environment."""
        self._data = self._make(self._task, size=1, seed=seed, **self._settings)
        self._entry, self._tries = self._data[0], 0
        return str(self._entry["question"])

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """As of Environment; a try after which another one follows is worth nothing."""
        self._tries += 1
        answer = action.strip()
        score = float(self._data.score_answer(answer=answer, entry=self._entry))
        is_right = score >= 1
        is_over = is_right or self._tries >= self._max_tries
        facts = {"acc": is_right, "pred": answer, "tries": self._tries}
        return "" if is_over else "That is not right. Try again.", score if is_over else 0.0, is_over, facts

    def gold_action(self) -> str | None:
        """The answer of the package."""
        answer = self._entry.get("answer")
        return None if answer is None else str(answer)
