"""Rendering by transformers, in its own sandboxed environment: the code that `apply_chat_template` runs."""

from __future__ import annotations

import contextlib
import datetime
import threading
from typing import Any

Rendered = tuple[list[str], list[list[tuple[int, int]]]]
"""Texts, and the {% generation %} spans of each, in characters."""


_CLOCK_LOCK = threading.Lock()
"""Held while a template renders that asks for the time: transformers keeps one compiled template for all."""


def render(chat_template: str, now: str, **arguments: Any) -> Rendered:
    """Render conversations.

    Args:
        chat_template: its text.
        now: the time that the template is told, in ISO form; empty: the clock of this machine.
        arguments: the others of `transformers.utils.chat_template_utils.render_jinja_template`.
    """
    from transformers.utils import chat_template_utils  # heavy, and most processes render nothing

    asks_for_time = "strftime_now" in chat_template
    with _CLOCK_LOCK if asks_for_time else contextlib.nullcontext():
        if asks_for_time:
            moment = datetime.datetime.fromisoformat(now) if now else datetime.datetime.now()
            compiled = chat_template_utils._compile_jinja_template(chat_template)
            compiled.environment.globals["strftime_now"] = lambda format: moment.strftime(format)  # noqa: A006
        rendered: Any = chat_template_utils.render_jinja_template(chat_template=chat_template, **arguments)
    texts, spans = rendered
    return texts, spans
