"""Values of settings as a file or a command line has them, for sentences."""

from __future__ import annotations

from collections.abc import Mapping


def setting_text(value: object, *, quotes: bool = False) -> str:
    """A value as YAML has it: true, null, [1, 2], {a: 1}.

    Args:
        value: of plain data.
        quotes: text is in quotes.
    """
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return repr(value) if quotes else value
        case list() | tuple():
            return f"[{', '.join(setting_text(entry, quotes=quotes) for entry in value)}]"
        case Mapping():
            entries = (f"{key}: {setting_text(entry, quotes=quotes)}" for key, entry in value.items())
            return f"{{{', '.join(entries)}}}"
        case _:
            return str(value)
