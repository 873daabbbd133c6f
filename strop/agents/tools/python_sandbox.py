"""Python programs of the model, run in the sandbox of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.agents.tools.base import BaseTool, ToolResponse, ToolUnavailable
from strop.agents.tools.schemas import OpenAIFunctionToolSchema
from strop.sandbox import Program, Sandbox

SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program and read what it prints.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "The program; print what you want to see."}
            },
            "required": ["code"],
        },
    },
}
_FENCE, _FENCE_TAGS = "```", ("", "python", "py")
_MAX_CODE_CHARACTERS = 100_000


class SandboxFailed(ToolUnavailable):
    """The sandbox did not do its work; this says nothing about the program."""


class PythonSandboxTool(BaseTool):
    """Programs of the model; each starts from nothing. Errors of a program are shown to the model as they are.

    Nothing is run without a sandbox: a call fails then.
    """

    sandbox: Sandbox | None = None
    """It runs, and serves all episodes of the process."""

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        if unknown := set(self.config) - {"type"}:
            raise ValueError(
                f"config has the unknown key {sorted(unknown)[0]!r}; limits of programs are set in reward.sandbox"
            )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """As of BaseTool.

        Raises:
            SandboxFailed: there is no sandbox, or it failed.
        """
        code = parameters.get("code")
        if not isinstance(code, str) or not code.strip():
            return ToolResponse(text='Error: give the program as text under "code".'), 0.0, {}
        if len(code) > _MAX_CODE_CHARACTERS:
            return (
                ToolResponse(text=f"Error: the program is longer than {_MAX_CODE_CHARACTERS} characters."),
                0.0,
                {},
            )
        if self.sandbox is None:
            raise SandboxFailed("no sandbox for programs is set up in this process")
        result = await self.sandbox.run(Program(code=_without_fence(code)))
        if result.outcome == "infrastructure":
            raise SandboxFailed(result.error or "the sandbox failed")
        parts = [result.text.rstrip("\n"), result.stderr.decode("utf-8", errors="replace").rstrip("\n")]
        if result.outcome not in ("ok", "error"):
            parts.append(f"Error: {result.error or result.outcome}")
        text = "\n".join(part for part in parts if part)
        return ToolResponse(text=text or "(nothing was printed)"), 0.0, {"outcome": result.outcome}


def _without_fence(code: str) -> str:
    """The content of a text that is one fenced block and nothing else; any other text as it is."""
    opening, _, content = code.strip().partition("\n")
    tag = opening.removeprefix(_FENCE).strip(" \t")
    if not opening.startswith(_FENCE) or tag not in _FENCE_TAGS or not content.endswith(_FENCE):
        return code
    return content.removesuffix(_FENCE).removesuffix("\n")
