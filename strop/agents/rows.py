"""Rows of a data set with the agent that plays them and the tools that their prompt shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from strop.agents.config import ENV_AGENT, SINGLE_TURN
from strop.agents.setup import AgentSetup


class AgentRows(Sequence[Mapping[str, Any]]):
    """The rows with columns agent_name and, for agents with tools, tools; made and checked as they are read."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], setup: AgentSetup, split: str) -> None:
        """Args:
        rows: as they are in the files.
        setup: agents and tools of the run.
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
            ValueError: it names an agent or tool that there is not.
        """
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        row = self._rows[number]
        self._setup.check_row(row, f"{self._split} row {number % len(self)}")
        shown = {**row, "agent_name": self._setup.agent_of(row)}
        schemas = self._setup.schemas_of(row)
        return shown if schemas is None else {**shown, "tools": schemas}


def with_agents(
    rows: Sequence[Mapping[str, Any]], setup: AgentSetup, split: str, *, is_streamed: bool = False
) -> Sequence[Mapping[str, Any]]:
    """The rows as agents need them; as they are where every one is a single turn.

    Raises:
        ValueError: a row names an agent or tool that there is not, or no row has a use for the tools.
    """
    if is_streamed:
        return AgentRows(rows, setup, split)
    names = {setup.agent_of(row) for row in rows}
    without = (
        {SINGLE_TURN, ENV_AGENT} if split == "train" else {SINGLE_TURN}
    )  # validation may leave tools alone
    if setup.tools and names and names <= without:
        raise ValueError(
            f"the run has tools ({', '.join(sorted(setup.tools))}), but every {split} row is played by "
            f"{' or '.join(sorted(names))}, which uses none: set agent.default_agent=tool_agent, give rows an "
            f"agent_name, or remove the tools"
        )
    if names <= {SINGLE_TURN}:
        return rows
    made = AgentRows(rows, setup, split)
    for number in range(len(made)):
        made[number]
    return made
