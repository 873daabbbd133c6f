"""The sandbox of a configuration, and the shared one of a reward worker process.

A reward worker scores one sample after the other in one thread. It gets its configuration before it loads the
reward function, and starts its sandbox with the first program.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from strop.sandbox.config import Limits, SandboxConfig
from strop.sandbox.config_handover import pending
from strop.sandbox.fusion import FusionSandbox
from strop.sandbox.hosted import HostedSandbox
from strop.sandbox.local import LocalSandbox
from strop.sandbox.program import Sandbox
from strop.utils.deadline import away

_START_S = 600.0
"""Limit of starting a sandbox and testing its isolation, in seconds."""

_lock = threading.Lock()


def make_sandbox(config: SandboxConfig) -> Sandbox:
    """The sandbox of a configuration, not started yet."""
    if config.backend == "sandbox_fusion":
        return FusionSandbox(config)
    return HostedSandbox(config) if config.backend == "e2b" else LocalSandbox(config)


def config_from_data(data: Mapping[str, Any]) -> SandboxConfig:
    """A configuration that came to another process as plain data (`dataclasses.asdict`)."""
    limits = Limits(**data["limits"])
    return SandboxConfig(**{**data, "limits": limits, "read_only_paths": tuple(data["read_only_paths"])})


class SharedSandbox:
    """The sandbox of this process, started by the first caller."""

    def __init__(self) -> None:
        self._config = SandboxConfig()
        self._sandbox: Sandbox | None = None

    def configure(self, config: SandboxConfig) -> None:
        """Set the configuration; a sandbox that runs already with another one is closed."""
        with _lock:
            if self._sandbox is not None and config != self._config:
                self._sandbox.close()
                self._sandbox = None
            self._config = config

    def get(self) -> Sandbox:
        """The running sandbox.

        Raises:
            SandboxUnavailable: programs cannot be isolated here.
        """
        if pending:
            self.configure(config_from_data(pending.pop()))
        with _lock:
            if self._sandbox is None:
                sandbox = make_sandbox(self._config)
                with away(_START_S):
                    sandbox.start()
                self._sandbox = sandbox
            return self._sandbox

    def close(self) -> None:
        """Close it; the next caller starts one again."""
        with _lock:
            sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()


shared = SharedSandbox()
