"""Line and spelling of a value in a YAML text; looked up only when a message needs them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import yaml

from strop.config.yaml_text import compose


def place_of(text: str, key: str) -> tuple[int, str] | None:
    """The line of a full key in a YAML text, and its value as it is written there; "" for one that is no plain value.
    None where the text has no such key.

    Args:
        text: of the file.
        key: with dots, and places in lists as [0].
    """
    parts: Sequence[str] = re.findall(r"[^.\[\]]+|\[\d+\]", key)
    try:
        node = compose(text)
    except yaml.YAMLError:
        return None
    line = 0
    for part in parts:
        if isinstance(node, yaml.SequenceNode) and part.startswith("[") and int(part[1:-1]) < len(node.value):
            node = node.value[int(part[1:-1])]
            line = node.start_mark.line + 1
            continue
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        match = next((pair for pair in pairs if pair[0].value == part), None)
        if match is None:
            return None
        line, node = match[0].start_mark.line + 1, match[1]
    if not isinstance(node, yaml.ScalarNode):
        return line, ""
    return line, node.value if not node.style else f'"{node.value}"'
