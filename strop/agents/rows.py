"""Rows of a data set with the agent that plays them and the schemas of what the model can call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from strop.agents.config import SINGLE_TURN
from strop.agents.setup import AgentSetup


class AgentRows(Sequence[Mapping[str, Any]]):
    """The rows with columns agent_name and, where there are schemas, tools; made and checked as they are read."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], setup: AgentSetup, split: str) -> None:
        """Args:
        rows: as they are in the files.
        setup: the agents of the run.
        split: for messages.
        """
        self._rows, self._setup, self._split = rows, setup, split

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, number: int, /) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, numbers: slice, /) -> Sequence[Mapping[str, Any]]: ...

    def __getitem__(self, number: int | slice, /) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        """One row, or several.

        Raises:
            ValueError: it names what there is not.
        """
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        return self._setup.shown_row(self._rows[number], f"{self._split} row {number % len(self)}")


def with_agents(
    rows: Sequence[Mapping[str, Any]], setup: AgentSetup, split: str, *, is_streamed: bool = False
) -> Sequence[Mapping[str, Any]]:
    """The rows as agents need them; as they are where every one is a single turn.

    Raises:
        ValueError: a row names what there is not, or no row has a use for what the run has.
    """
    if is_streamed:
        return AgentRows(rows, setup, split)
    names = {setup.agent_of(row) for row in rows}
    if names:
        for kit in setup.kits.values():
            kit.check_agents(names, split)
    if names <= {SINGLE_TURN}:
        return rows
    made = AgentRows(rows, setup, split)
    for number in range(len(made)):
        made[number]
    return made
