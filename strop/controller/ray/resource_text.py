"""Resources of nodes and of places, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop.controller.ray.cluster import Node

TYPE = "accelerator_type:"
"""Beginning of the resource that a node with devices of a type has 1 of."""


def in_words(resources: Mapping[str, float]) -> str:
    """`1 CPU and 1 GPU of type H100`."""
    types = [name.removeprefix(TYPE) for name in resources if name.startswith(TYPE)]
    amounts = " and ".join(
        f"{amount:g} {name}" for name, amount in resources.items() if not name.startswith(TYPE)
    )
    return " ".join([amounts, *(f"of type {name}" for name in types)])


def resources_text(nodes: Sequence[Node]) -> str:
    """Resources of each node, and how much of them is free."""
    names = sorted({name for node in nodes for name in node.total if name.isupper()})
    return "; ".join(
        f"node {node.address}{_types_text(node)} has "
        + (
            ", ".join(
                f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g} {name} free" for name in names
            )
            or "nothing to give"
        )
        for node in nodes
    )


def _types_text(node: Node) -> str:
    types = [name.removeprefix(TYPE) for name in node.total if name.startswith(TYPE)]
    return f" ({', '.join(types)})" if types else ""
