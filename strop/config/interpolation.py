"""`${...}` in values, as in Hydra's files: another key of the configuration, or a variable of the environment.

    ${rollout.samples_per_prompt}    the value of that key, from the top
    ${.lr}, ${..seed}                from the section of the key itself, or the one above it
    ${oc.env:HOME}, ${oc.env:HOME,/root}    a variable of the environment, or else what stands after the comma

A value that is one `${...}` and nothing else takes over the type; within a text its words are put in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from strop.config.schema import locate, tree
from strop.config.unknown_key import KeyAliases
from strop.config.yaml_text import parse
from strop.utils.field_types import fits

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")


class Interpolation:
    """Resolver of `${...}` among the values of one configuration."""

    def __init__(self, root: type, values: Mapping[str, Any], aliases: KeyAliases | None = None) -> None:
        self._root, self._values, self._aliases = root, values, aliases

    def value(self, written: Any, key: str, *, above: tuple[str, ...] = ()) -> Any:
        """A value, or a list of values, with everything put in.

        Args:
            written: the value as it was written.
            key: its full key.
            above: keys whose values lead here.

        Raises:
            ValueError: there is no such key, variable or function; or keys that stand for each other.
        """
        if key in above:
            raise ValueError(f"{' -> '.join((*above, key))}: these keys stand for each other")
        if isinstance(written, list):
            return [self.value(entry, key, above=above) for entry in written]
        if not isinstance(written, str):
            return written
        result: Any = written
        while isinstance(result, str) and (match := _INNERMOST.search(result)):
            inner = self._named(match[1].strip(), key, (*above, key))
            if match[0] == result:
                return inner
            if isinstance(inner, str) and "${" in inner:
                raise ValueError(f"{match[0]} gives {inner!r}, which is not resolved again")
            result = f"{result[: match.start()]}{_as_text(inner)}{result[match.end() :]}"
        if "${" in result:
            raise ValueError("a ${ in it is not closed by }")
        return result

    def _named(self, name: str, key: str, above: tuple[str, ...]) -> Any:
        if ":" in name:
            return self._from_environment(name, key)
        if name.startswith("."):
            dots = len(name) - len(name.lstrip("."))
            parts = key.split(".")
            if dots > len(parts):
                raise ValueError(f"${{{name}}} leads above the top of the configuration")
            name = ".".join([*parts[: len(parts) - dots], name.lstrip(".")])
        target, entry = locate(self._root, name, aliases=self._aliases)
        if entry or target.is_section:
            kind = "an entry of a free dict" if entry else "a section"
            raise ValueError(f"${{{name}}} is {kind}; name a key with one value")
        value = self._values.get(name, target.default)
        return self.value(list(value) if isinstance(value, tuple) else value, name, above=above)

    def _from_environment(self, name: str, key: str) -> Any:
        function, _, argument = name.partition(":")
        if function != "oc.env":
            raise ValueError(
                f"${{{function}:...}} is a function of Hydra or OmegaConf that is not taken; there are other keys, "
                f"${{section.key}}, and ${{oc.env:VARIABLE}}"
            )
        variable, comma, otherwise = (part.strip() for part in argument.partition(","))
        text = os.environ.get(variable, otherwise if comma else None)
        if text is None:
            raise ValueError(
                f"the variable {variable} is not set; set it, or write ${{oc.env:{variable},VALUE}}"
            )
        hint = tree(self._root)[key].hint
        parsed = parse(text, variable) if not fits(hint, text) else text
        return parsed if isinstance(parsed, bool | int | float | None) else text


def _as_text(value: object) -> str:
    if isinstance(value, list | dict):
        raise ValueError(f"{value!r} cannot be put into a text")
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
