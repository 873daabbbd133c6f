"""Chat templates in the shapes of real model families, written for the tests, with how each model writes answers.

A tokenizer with merges, so that where a text is cut changes its tokens.
"""

# ruff: noqa: E501  (templates are one program per string)
from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Call = tuple[str, Mapping[str, Any]]

QWEN25 = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You help.' }}{%- endif %}
{{- '\\n\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not (loop.first and tools)) or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
{%- for c in m.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}{{- c.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Thinking is shown after the last question of the user alone.
QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role in ['user', 'system'] %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content or '' %}
{%- set thought = '' %}
{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and thought %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
{%- for c in m.tool_calls or [] %}
{%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}{{- c.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\nTools:' }}
{%- for tool in tools %}{{- '\\n\\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- m.content | tojson }}{{- '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + f.name + '", "parameters": ' }}{{- f.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# No role for tools, and turns must alternate.
GEMMA = """\
{{- '<bos>' }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Thinking of every earlier answer is dropped; the header opens the next one; arguments are text.
DEEPSEEK = """\
{{- '<｜begin▁of▁sentence｜>' }}
{%- if tools %}{{- '## Tools' }}{%- for tool in tools %}{{- '\\n' + tool.function.name }}{%- endfor %}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{%- set content = (m.content or '').split('</think>')[-1] %}
{{- '<｜Assistant｜>' + content }}
{%- if m.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{%- if not loop.last %}{{- '\\n' }}{%- endif %}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<｜tool▁outputs▁begin｜>' }}{%- endif %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""

# Tool schemas stand before the last question; ids of calls have nine characters and must be known.
MISTRAL = """\
{{- '<s>' }}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
{{- '{"name": "' + c.function.name + '", "arguments": ' }}{{- c.function.arguments | tojson }}{{- ', "id": "' + c.id + '"}' }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- ']</s>' }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + '</s>' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' }}{{- m.content | tojson }}{{- ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

# Nothing ends a turn but the header of the next one, which the model writes itself.
GLM = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n# Tools' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content or '' %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{{- '<|assistant|>\\n' }}
{%- if loop.index0 > ns.last and thought %}{{- '<think>' + thought + '</think>\\n' }}{%- endif %}
{{- content.strip() }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>' + c.function.name + '\\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}{{- v if v is string else v | tojson }}{{- '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""

# Channels; analysis of earlier answers is dropped once the final channel has spoken.
GPT_OSS = """\
{{- '<|start|>system<|message|>You help.<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|># Tools\\nnamespace functions {' }}
{%- for tool in tools %}{{- '\\ntype ' + tool.function.name + ' = () => any;' }}{%- endfor %}{{- '}<|end|>' }}{%- endif %}
{%- set ns = namespace(call='', final=-1) %}
{%- for m in messages %}{%- if m.role == 'assistant' and not m.tool_calls %}{%- set ns.final = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if '<|channel|>' in (m.content or '') %}{{- raise_exception('channel tags in the content') }}{%- endif %}
{%- if m.thinking and loop.index0 > ns.final - (1 if loop.last else 0) %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{%- if m.tool_calls %}
{%- if m.content and m.thinking %}{{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls') }}{%- endif %}
{%- set f = m.tool_calls[0].function %}
{%- set ns.call = f.name %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}{{- f.arguments | tojson }}{{- '<|call|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- set ns.call = '' %}
{%- endif %}
{%- elif m.role == 'tool' %}
{%- if not ns.call %}{{- raise_exception('no call before the result') }}{%- endif %}
{{- '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' }}{{- m.content | tojson }}{{- '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

KIMI = """\
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' }}{{- tools | tojson }}{{- '<|im_end|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_assistant|>assistant<|im_middle|>' + (m.content or '') }}
{%- if m.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for c in m.tool_calls %}
{{- '<|tool_call_begin|>functions.' + c.function.name + ':' + loop.index0 | string + '<|tool_call_argument_begin|>' }}{{- c.function.arguments | tojson }}{{- '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{%- elif m.role == 'tool' %}{{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content }}
{%- else %}{{- '<|im_user|>' + m.role + '<|im_middle|>' + m.content }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""

CODER = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}{{- '\\n' + tool.function.name }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user\\n' }}{%- endif %}
{{- '<tool_response>\\n' + m.content + '\\n</tool_response>\\n' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<parameter=' + k + '>\\n' }}{{- v if v is string else v | tojson }}{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

PYTHONIC = """\
{{- '<|begin_of_text|>' }}
{%- if tools %}{{- '<|header_start|>system<|header_end|>\\n\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|eot|>' }}{%- endif %}
{%- for m in messages %}
{{- '<|header_start|>' + ('ipython' if m.role == 'tool' else m.role) + '<|header_end|>\\n\\n' + (m.content or '') }}
{%- if m.tool_calls %}
{{- '[' }}
{%- for c in m.tool_calls %}
{{- c.function.name + '(' }}
{%- for k, v in c.function.arguments.items() %}{{- k + '=' }}{{- v | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}
{{- ')' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- ']' }}
{%- endif %}
{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """A template and the habits of its models."""

    name: str
    template: str
    format: str
    """Name of the tool-call format that must be found."""
    control: tuple[str, ...]
    end: str
    """Token that ends an answer without calls."""
    write_calls: Callable[[Sequence[Call]], str]
    """What the model writes for calls."""
    call_end: str = ""
    """Token that ends an answer with calls, where it is another one."""
    write_thinking: Callable[[str], str] | None = None
    """None for models that do not think."""
    before_content: str = ""
    """What opens the text of an answer after the header."""
    forgets_at: frozenset[str] = frozenset()
    rewrites_at: frozenset[str] = frozenset()
    reply_role: str = "tool"
    separator: str = ""
    is_parallel: bool = True


def _hermes(calls: Sequence[Call]) -> str:
    blocks = [f'<tool_call>\n{{"name": "{n}", "arguments": {json.dumps(a)}}}\n</tool_call>' for n, a in calls]
    return "\n".join(blocks)


def _think(thought: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n"


def _llama(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {json.dumps(a)}}}' for n, a in calls)


def _deepseek(calls: Sequence[Call]) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(blocks) + "<｜tool▁calls▁end｜>"


def _mistral(calls: Sequence[Call]) -> str:
    blocks = [
        f'{{"name": "{n}", "arguments": {json.dumps(a)}, "id": "call{i:05d}"}}'
        for i, (n, a) in enumerate(calls)
    ]
    return f"[TOOL_CALLS] [{', '.join(blocks)}]"


def _glm(calls: Sequence[Call]) -> str:
    return "".join(
        f"\n<tool_call>{n}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{v if isinstance(v, str) else json.dumps(v)}</arg_value>\n"
            for k, v in a.items()
        )
        + "</tool_call>"
        for n, a in calls
    )


def _harmony(calls: Sequence[Call]) -> str:
    ((name, arguments),) = calls
    return f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(arguments)}"


def _kimi(calls: Sequence[Call]) -> str:
    blocks = [
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|>"


def _coder(calls: Sequence[Call]) -> str:
    return "".join(
        f"\n<tool_call>\n<function={n}>\n"
        + "".join(
            f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n"
            for k, v in a.items()
        )
        + "</function>\n</tool_call>"
        for n, a in calls
    )


def _pythonic(calls: Sequence[Call]) -> str:
    return (
        "["
        + ", ".join(f"{n}({', '.join(f'{k}={json.dumps(v)}' for k, v in a.items())})" for n, a in calls)
        + "]"
    )


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

FAMILIES = [
    Family("qwen25", QWEN25, "hermes", CHATML, "<|im_end|>", _hermes, separator="\n"),
    Family(
        "qwen3", QWEN3, "hermes", CHATML, "<|im_end|>", _hermes, write_thinking=_think,
        forgets_at=frozenset({"user"}), separator="\n",
    ),
    Family(
        "llama3", LLAMA3, "llama3_json",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        "<|eot_id|>", _llama, is_parallel=False,
    ),
    Family(
        "gemma", GEMMA, "hermes", ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", _hermes,
        reply_role="user", separator="\n",
    ),
    Family(
        "deepseek", DEEPSEEK, "deepseek",
        (
            "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
            "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>",
        ),
        "<｜end▁of▁sentence｜>", _deepseek, write_thinking=lambda t: f"{t}\n</think>\n\n",
        forgets_at=frozenset({"user", "tool"}),
    ),
    Family(
        "mistral", MISTRAL, "mistral",
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>", _mistral, before_content=" ", rewrites_at=frozenset({"user"}),
    ),
    Family(
        "glm", GLM, "glm",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        "<|user|>", _glm, call_end="<|observation|>", write_thinking=lambda t: f"<think>{t}</think>\n",
        forgets_at=frozenset({"user"}),
    ),
    Family(
        "gpt_oss", GPT_OSS, "gpt_oss",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
        "<|return|>", _harmony, call_end="<|call|>",
        write_thinking=lambda t: f"<|channel|>analysis<|message|>{t}<|end|><|start|>assistant",
        before_content="<|channel|>final<|message|>", forgets_at=frozenset({"user"}), is_parallel=False,
    ),
    Family(
        "kimi", KIMI, "kimi",
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>",
         "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
         "<|tool_calls_section_end|>"),
        "<|im_end|>", _kimi,
    ),
    Family("coder", CODER, "qwen3_coder", CHATML, "<|im_end|>", _coder, separator="\n"),
    Family(
        "pythonic", PYTHONIC, "pythonic", ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>"),
        "<|eot|>", _pythonic,
    ),
]  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}

_CORPUS = [
    "assistant\n", "user\n", "system\n\n", "<tool_call>\n{\"name\": \"look_up\", \"arguments\": {\"value\": 1}}\n</tool_call>",
    "\n<tool_response>\n", "\n</tool_response>", "<think>\n", "\n</think>\n\n", "the answer is 12.\n\n", "1 + 2 = 3\n",
    "```json\n", "\n```", "}}\n", "\n\n\n", "functions", "commentary", "analysis", "final", "<function=", "</parameter>\n",
]  # fmt: skip


@functools.cache
def family_tokenizer(name: str) -> Any:
    """A tokenizer with the family's control tokens and its template."""
    family = BY_NAME[name]
    return tokenizer_of(family.template, control=family.control, end=family.end)


def tokenizer_of(template: str, *, control: Sequence[str], end: str) -> Any:
    """A byte-level tokenizer with a few hundred merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 150, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in control])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    return fast
