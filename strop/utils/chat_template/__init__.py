"""Chat templates: from messages to text, whoever wrote the template.

answers.py       Text of an answer, without special tokens but those that open and close a part of it
process.py       A process in which chat templates are rendered that nobody has vouched for
process_main.py  Main program of the process in which chat templates are rendered
rendering.py     Rendering by transformers, in its own sandboxed environment

A template comes with a model, and a model may come from anybody: it is rendered in a process of its own, unless the
user trusts the model's code (model.trust_remote_code).
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from strop.utils.chat_template.process import RenderingStopped, render_apart
from strop.utils.chat_template.rendering import Rendered, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARS = 1 << 17
"""Of a chat template. Those of well-known models have up to 20,000."""
_RENDERED = "strop_rendered_template"
_CLOCK = "strop_template_clock"
_TRUSTED = "strop_trusts_template"
_now: contextvars.ContextVar[str] = contextvars.ContextVar("now", default="")
"""Of the rendering under way; empty: the clock of this machine."""
_is_trusted: contextvars.ContextVar[bool] = contextvars.ContextVar("is_trusted", default=False)


class TemplateRefused(ValueError):
    """The chat template cannot render these messages."""


class TemplateTooCostly(ValueError):
    """The chat template does not end, or makes too much: no conversation can be rendered with it."""


def trust_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render the tokenizer's chat template in this process from here on, without a limit on time and memory."""
    setattr(tokenizer, _TRUSTED, True)


def render_with(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Render another text than the tokenizer's chat template from here on; what is saved with the tokenizer stays."""
    if template != tokenizer.chat_template:
        setattr(tokenizer, _RENDERED, template)


def asks_for_time(template: object) -> bool:
    """A chat template, or one of several by name, reads the clock."""
    return "strftime_now" in repr(template)


def stop_clock(tokenizer: PreTrainedTokenizerBase, date: str) -> None:
    """Let templates that ask for the time (strftime_now) be told one moment from here on.

    Args:
        tokenizer: with a chat template.
        date: in ISO form; empty: the beginning of this day.
    """
    today = datetime.datetime.combine(datetime.date.today(), datetime.time())
    setattr(tokenizer, _CLOCK, datetime.datetime.fromisoformat(date) if date else today)


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    **options: Any,
) -> Any:
    """Apply the chat template, as `tokenizer.apply_chat_template` does.

    Arguments of tool calls that are objects are given as JSON text where the template refuses the conversation
    otherwise: DeepSeek's adds them to a text.

    Args:
        tokenizer: with a chat template.
        messages: of the conversation.
        tools: schemas; None for none.
        options: other arguments of that method, and variables of the template.

    Raises:
        TemplateRefused: the template knows no such conversation, or has an error.
        TemplateTooCostly: it took more time or memory than any conversation needs.
    """
    return _apply(tokenizer, [dict(message) for message in messages], tools, options)


def apply_template_to_all(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    tools: Sequence[Any] | None,
    **options: Any,
) -> list[str]:
    """Texts of several conversations with the same tools and options, rendered at once: as `apply_template` without
    tokens; an error is that of any of them."""
    plain = [[dict(message) for message in messages] for messages in conversations]
    texts: list[str] = _apply(tokenizer, plain, tools, {**options, "tokenize": False})
    return texts


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    conversation: list[Any],
    tools: Sequence[Any] | None,
    options: dict[str, Any],
) -> Any:
    try:
        return _apply_once(tokenizer, conversation, tools, options)
    except TemplateRefused:
        with_texts = _with_argument_texts(conversation)
        if with_texts == conversation:
            raise
        with contextlib.suppress(TemplateRefused):
            return _apply_once(tokenizer, with_texts, tools, options)
        raise


def _with_argument_texts(messages: Any) -> Any:
    """A conversation, or several, with the arguments of tool calls as JSON text."""
    if isinstance(messages, list):
        return [_with_argument_texts(message) for message in messages]
    if not isinstance(messages, Mapping) or not isinstance(calls := messages.get("tool_calls"), list):
        return messages
    return {**messages, "tool_calls": [_with_argument_text(call) for call in calls]}


def _with_argument_text(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_argument_text(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, Mapping):
        return call
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False, default=str)}


def _apply_once(
    tokenizer: PreTrainedTokenizerBase,
    conversation: list[Any],
    tools: Sequence[Any] | None,
    options: dict[str, Any],
) -> Any:
    _render_apart_by_default()
    if (template := getattr(tokenizer, _RENDERED, None)) is not None:
        options = {"chat_template": template, **options}
    clock = getattr(tokenizer, _CLOCK, None)
    now = _now.set(clock.isoformat() if clock else "")
    is_trusted = _is_trusted.set(getattr(tokenizer, _TRUSTED, False))
    try:
        schemas = None if tools is None else list(tools)
        return tokenizer.apply_chat_template(conversation, tools=schemas, **options)
    except RenderingStopped as error:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        cause = f"ends with {error}" if str(error) else "loops, or writes far more than it is given"
        raise TemplateTooCostly(
            f"the chat template of {name} {cause}, and was stopped; correct it (chat_template.jinja or "
            f"tokenizer_config.json in the model folder), or use another model"
        ) from None
    except TemplateTooCostly:
        raise
    except RecursionError:
        raise TemplateRefused("the messages or tools are nested too deeply") from None
    except (
        jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, SyntaxError,
    ) as error:  # fmt: skip
        raise TemplateRefused(f"{error}" or type(error).__name__) from error
    finally:
        _now.reset(now)
        _is_trusted.reset(is_trusted)


@functools.cache
def _render_apart_by_default() -> None:
    """Have tokenizers of transformers render through `_render`, in the whole process: also those of code of the user's.

    Raises:
        RuntimeError: this version of transformers renders chat templates in another way.
    """
    import transformers  # heavy, and most processes render nothing
    from transformers.utils import chat_template_utils

    tokenizers: Any = transformers.tokenization_utils_base
    used = {
        tokenizers: ("render_jinja_template",),
        chat_template_utils: ("render_jinja_template", "_compile_jinja_template", "_plain_template_data"),
    }
    missing = [name for module, names in used.items() for name in names if not hasattr(module, name)]
    if missing:
        raise RuntimeError(
            f"transformers {transformers.__version__} has no {', '.join(missing)}: it renders chat templates in a "
            f"way that strop does not know, so what they do cannot be bounded; install the version that "
            f"constraints.txt names"
        )
    tokenizers.render_jinja_template = _render


def _render(conversations: object, tools: object = None, *, chat_template: str, **arguments: Any) -> Rendered:
    if len(chat_template) > MAX_CHARS:
        raise TemplateTooCostly(
            f"the chat template has {len(chat_template)} characters, more than {MAX_CHARS}: correct it "
            f"(chat_template.jinja or tokenizer_config.json in the model folder), or use another model"
        )
    render_here_or_apart = render if _is_trusted.get() else render_apart
    return render_here_or_apart(
        chat_template, _now.get(), conversations=conversations, tools=tools, **arguments
    )
