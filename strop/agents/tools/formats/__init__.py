"""Formats of tool calls.

calls.py      calls from JSON and from parameters
parser.py     ToolParser: finds a format by name or by the chat template; users register their own
scanning.py   marks found in linear time
tagged.py     JSON or parameters between tags: hermes (Qwen), qwen3_coder, glm
sections.py   control tokens around names and arguments: deepseek, kimi, mistral, gpt_oss
bare.py       calls without tags: llama3_json, pythonic
pythonic.py   calls as a Python list, read without Python's own parser
"""

from __future__ import annotations

from strop.agents.tools.formats import bare, sections, tagged
from strop.agents.tools.formats.parser import ToolParser, formats, parser_for_template
from strop.agents.tools.parsed_output import FunctionCall, MalformedCall, ParsedTurn

__all__ = [
    "FunctionCall",
    "MalformedCall",
    "ParsedTurn",
    "ToolParser",
    "bare",
    "formats",
    "parser_for_template",
    "sections",
    "tagged",
]
