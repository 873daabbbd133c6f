"""Programs that tools run: the sandbox of the run, for the agents of one rollout worker."""

from __future__ import annotations

from strop.agents.setup import AgentSetup
from strop.sandbox import Program, SandboxConfig, make_sandbox
from strop.tools.python_sandbox import PythonSandboxTool, Ran, use_sandbox


class ToolSandbox:
    """Made for a worker whose agents have a tool for programs; does nothing for others."""

    def __init__(self, setup: AgentSetup, config: SandboxConfig) -> None:
        """Start the sandbox, so that a run without isolation does not begin.

        Args:
            setup: agents and tools.
            config: reward.sandbox.

        Raises:
            SandboxUnavailable: programs cannot be isolated here.
        """
        is_needed = any(isinstance(tool, PythonSandboxTool) for tool in setup.tools.values())
        self._sandbox = make_sandbox(config) if is_needed else None
        if self._sandbox is not None:
            self._sandbox.start()
            use_sandbox(self._run)

    async def _run(self, code: str) -> Ran:
        assert self._sandbox is not None, "tools are given this only with a sandbox"
        result = await self._sandbox.run(Program(code=code))
        return Ran(
            outcome=result.outcome,
            stdout=result.text,
            stderr=result.stderr.decode("utf-8", errors="replace"),
            message=result.error,
        )

    def close(self) -> None:
        """End it; a second call does nothing."""
        if self._sandbox is not None:
            use_sandbox(None)
            self._sandbox.close()
            self._sandbox = None
