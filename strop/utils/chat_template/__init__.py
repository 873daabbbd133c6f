"""The one door to chat templates: from messages to text, whoever wrote the template.

A template comes with a model, and a model may come from anybody: `bounded` sees to what a rendering may cost.
"""

from __future__ import annotations

import contextvars
import datetime
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

_RENDERED = "strop_rendered_template"
_CLOCK = "strop_template_clock"
_told_time: contextvars.ContextVar[datetime.datetime | None] = contextvars.ContextVar(
    "told_time", default=None
)
"""Of the rendering under way; None: the clock of this machine."""


class TemplateRefused(ValueError):
    """The chat template cannot render these messages."""


class OutOfSteps(Exception):
    """A template has used up what it may, or the stack. No TemplateError: those are refusals of a conversation."""


class TemplateTooCostly(ValueError):
    """The chat template does not end, or makes too much: no conversation can be rendered with it."""


def render_with(tokenizer: Any, template: str) -> None:
    """Render another text than the tokenizer's chat template from here on; what is saved with the tokenizer stays."""
    if template != tokenizer.chat_template:
        setattr(tokenizer, _RENDERED, template)


def asks_for_time(template: Any) -> bool:
    """Whether a chat template, or one of several by name, is told the time."""
    return "strftime_now" in repr(template)


def strftime_now(format: str) -> str:  # noqa: A002  (the name that templates may give it by)
    """The time that a template is told."""
    return (_told_time.get() or datetime.datetime.now()).strftime(format)


def stop_clock(tokenizer: Any, date: str) -> None:
    """Let templates that ask for the time (strftime_now) be told one moment from here on.

    Args:
        tokenizer: with a chat template.
        date: in ISO form; empty: the beginning of this day.
    """
    today = datetime.datetime.combine(datetime.date.today(), datetime.time())
    setattr(tokenizer, _CLOCK, datetime.datetime.fromisoformat(date) if date else today)


def apply_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, **options: Any
) -> Any:
    """What `tokenizer.apply_chat_template` returns.

    Args:
        tokenizer: with a chat template.
        messages: of the conversation.
        tools: schemas; None for none.
        options: other arguments of that method, and variables of the template.

    Raises:
        TemplateRefused: the template knows no such conversation, or has an error.
        TemplateTooCostly: it took more steps than any conversation needs.
    """
    _bound()
    if (template := getattr(tokenizer, _RENDERED, None)) is not None:
        options = {"chat_template": template, **options}
    told = _told_time.set(getattr(tokenizer, _CLOCK, None))
    try:
        return tokenizer.apply_chat_template([dict(one) for one in messages], tools=tools, **options)
    except OutOfSteps as error:
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
        _told_time.reset(told)


@functools.cache
def _bound() -> None:
    """See to what a rendering may cost."""
    from strop.utils.chat_template.bounded import bound  # imports this module

    bound()
