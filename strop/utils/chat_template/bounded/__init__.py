"""A budget for every chat template: however it was written, a rendering ends, and makes no text of gigabytes.

`transformers` compiles templates itself. From the first text on it compiles them with the budget of budget.py, so that
nothing in this process renders one without it.
"""

from __future__ import annotations

import functools

import jinja2

from strop.utils.chat_template import TemplateTooCostly
from strop.utils.chat_template.bounded.budget import BoundedEnvironment

MAX_CHARS = 1 << 17
"""Of a chat template. Those of well-known models have up to 20,000; to compile one of this size takes up to 3 s."""


def bound() -> None:
    """Have transformers compile templates with the budget.

    Raises:
        RuntimeError: this version of transformers compiles them in another way.
    """
    from transformers.utils import chat_template_utils as own  # heavy, and most processes render nothing

    compile_unbounded = getattr(own, "_compile_jinja_template", None)
    if compile_unbounded is None:
        raise RuntimeError(
            "this version of transformers compiles chat templates in a way that strop does not know, so what they do "
            "cannot be bounded; install the version that constraints.txt names"
        )

    @functools.lru_cache
    def compile_bounded(chat_template: str) -> jinja2.Template:
        """An environment for each, as in transformers: an extension keeps what one rendering has found."""
        if len(chat_template) > MAX_CHARS:
            raise TemplateTooCostly(
                f"the chat template has {len(chat_template)} characters, more than {MAX_CHARS}: correct it "
                f"(chat_template.jinja or tokenizer_config.json in the model folder), or use another model"
            )
        return BoundedEnvironment(compile_unbounded("").environment).from_string(chat_template)

    own._compile_jinja_template = compile_bounded
