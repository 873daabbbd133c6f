"""Messages between a remote engine and its server, on a connection that strop.controller.auth_listener let in.

caller -> server   {"call": n, "do": name, "with": {...}}     a method of the engine
                   {"cancel": n}                              nobody waits for this call any more
server -> caller   {"hello": {"version": v, "abilities": [...]}}
                   {"call": n, "token": [id, log-prob, version]}
                   {"call": n, "done": value, "version": v}
                   {"call": n, "failed": [type, sentence]}
"""

from __future__ import annotations

from dataclasses import dataclass, field

PURPOSE = "rollout engine"


@dataclass(frozen=True, kw_only=True)
class EngineAddress:
    """Where an engine is served; plain data that the owner of the process hands on."""

    host: str
    port: int
    secret: str = field(repr=False)
    """Only who proves to know it is heard."""
