"""Cost budget of a judge."""

from __future__ import annotations

import math


class CostBudget:
    """Remaining cost of the judge in this process, one of several that ask it for one run.

    What is left of the limit is divided by the number of processes whenever the run says what all of them have spent;
    between two such moments none needs to know of the others.
    """

    def __init__(self, limit: float | None, *, count: int = 1) -> None:
        """Args:
        limit: of the run; None: none.
        count: processes that spend.
        """
        self._limit, self._count = limit, count
        self.cost = 0.0
        """By this process."""
        self._unreadable = False
        self.set_cost(0.0)

    def set_cost(self, run_cost: float) -> None:
        """Set the cost of the run so far, in all its processes and starts."""
        self._run_cost, self._cost_then = run_cost, self.cost
        rest = math.inf if self._limit is None else max(0.0, self._limit - run_cost)
        self._ends_at = self.cost + rest / self._count

    def pay(self, cost: float) -> None:
        """Add the cost of a request."""
        self.cost += cost

    def pay_unknown(self) -> None:
        """Note a request whose cost the server does not say."""
        self._unreadable = True

    def refusal(self) -> str:
        """Reason why nothing more may be asked; empty where it may."""
        if self._limit is None or (self.cost < self._ends_at and not self._unreadable):
            return ""
        if self._unreadable:
            return (
                "sends no token counts (`usage`), so reward.judge.max_cost cannot be kept and nothing more is asked: "
                "use a server that counts, or remove max_cost"
            )
        cost = self._run_cost + self.cost - self._cost_then
        share = "" if self._count == 1 else ", and this worker has used up its share of the rest"
        return (
            f"was not asked: the run has spent {cost:.4g} of reward.judge.max_cost={self._limit:g}{share}; raise it "
            f"to go on (also with --resume)"
        )
