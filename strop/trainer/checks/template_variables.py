"""Variables of a run for its chat template that the template does not read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strop.utils.verdict import Check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_variables(
    section: str, options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Check | None:
    """A warning about variables whose name is nowhere in the template; None where there are none.

    Args:
        section: of the settings, for example `data`.
        options: its `chat_template_kwargs`.
        tokenizer: with the template, where it has one.
    """
    template: Any = tokenizer.chat_template or ""
    text = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)
    words = set(re.findall(r"\w+", text))
    unread = [name for name in options if name not in words]
    if not unread or not words:
        return None
    return Check(
        name="template",
        level="warn",
        text=f"the chat template reads no {' and no '.join(map(repr, unread))}, so naming that in "
        f"{section}.chat_template_kwargs changes nothing",
        advice="correct the name, or leave it out",
    )
