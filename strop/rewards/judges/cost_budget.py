"""What asking a judge may cost."""

from __future__ import annotations

import math


class CostBudget:
    """What the judge may still cost in this process, one of several that ask it for one run.

    What is left of the limit is divided by the number of processes whenever the run says what all of them have spent;
    between two such moments none needs to know of the others.
    """

    def __init__(self, limit: float | None, *, count: int = 1) -> None:
        """Args:
        limit: of the run; None: none.
        count: processes that spend.
        """
        self._limit, self._count = limit, count
        self.spent = 0.0
        """By this process."""
        self._unreadable = False
        self.tell(0.0)

    def tell(self, run_spent: float) -> None:
        """What the run has spent so far, in all its processes and starts."""
        self._run_spent, self._at = run_spent, self.spent
        left = math.inf if self._limit is None else max(0.0, self._limit - run_spent)
        self._ends_at = self.spent + left / self._count

    def pay(self, cost: float) -> None:
        """A request has cost that much."""
        self.spent += cost

    def pay_unknown(self) -> None:
        """A request has cost something, and the server does not say how much."""
        self._unreadable = True

    def refusal(self) -> str:
        """Why nothing more may be asked; empty where it may."""
        if self._limit is None or (self.spent < self._ends_at and not self._unreadable):
            return ""
        if self._unreadable:
            return (
                "sends no token counts (`usage`), so reward.judge.max_cost cannot be kept and nothing more is asked: "
                "use a server that counts, or remove max_cost"
            )
        known = self._run_spent + self.spent - self._at
        share = "" if self._count == 1 else ", and this worker has used up its share of the rest"
        return (
            f"was not asked: the run has spent {known:.4g} of reward.judge.max_cost={self._limit:g}{share}; raise it "
            f"to go on (also with --resume)"
        )
