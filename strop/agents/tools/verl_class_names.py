"""Classes of verl that a tool, interaction or loop file may name, and their equivalents."""

from __future__ import annotations

_EQUIVALENTS = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "strop.agents.tools.gsm8k.Gsm8kTool",
    "verl.tools.search_tool.SearchTool": "strop.agents.tools.search.SearchTool",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": "strop.agents.tools.python_sandbox.PythonSandboxTool",
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction": "strop.agents.interactions.gsm8k.Gsm8kInteraction",
}
_HINTS = {
    "ToolAgentLoop": "that loop is built in: set agent.default_agent=tool_agent, and no agent.loops",
    "SingleTurnAgentLoop": "that loop is built in: set agent.default_agent=single_turn_agent, and no agent.loops",
    "Geo3kTool": "give the rows a reward function (the built-in scorer of geometry reads such answers), or write the "
    "tool as a subclass of strop.agents.BaseTool",
    "ImageZoomInTool": "write it as a subclass of strop.agents.BaseTool: execute returns ToolResponse(image=[...])",
    "WeatherInteraction": "write it as a subclass of strop.agents.BaseInteraction",
}


def equivalent_class(dotted: str) -> str:
    """The dotted path of the class that stands for one of verl; any other path as it is.

    Raises:
        ValueError: the class is verl's, and has no equivalent.
    """
    if dotted in _EQUIVALENTS or not dotted.startswith("verl."):
        return _EQUIVALENTS.get(dotted, dotted)
    default_hint = "copy its file, and import from strop.agents what it imports from verl"
    raise ValueError(
        f"{dotted!r}, a class of verl that is not in strop: {_HINTS.get(dotted.rpartition('.')[2], default_hint)}"
    )
