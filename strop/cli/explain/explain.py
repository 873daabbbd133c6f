"""`strop config explain`: all about a key, in the words of the tree of settings and of the registries behind some."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strop.compat.key_aliases import key_aliases
from strop.config.explanation import Explanation, explain, papers_in
from strop.utils.registry import packaged, packages_of
from strop.utils.terminal import UsageError, print_json, print_plain

_WIDTH = 100
REGISTRY_KEYS = {
    "algorithm.adv_estimator": "advantage estimator",
    "algorithm.adv_settings": "advantage estimator",
    "algorithm.policy_loss": "policy loss",
    "algorithm.loss_settings": "policy loss",
    "algorithm.filter_groups.filter": "filter",
    "algorithm.reward_shaping": "reward shaping",
    "algorithm.shaping_settings": "reward shaping",
    "data.sampler": "sampler",
}
"""Keys whose values are registered functions, or the settings of such."""
PACKAGE_KEYS = {
    "algorithm.adv_estimator": "strop.estimators",
    "algorithm.policy_loss": "strop.policy_losses",
    "algorithm.filter_groups.filter": "strop.filters",
    "algorithm.reward_shaping": "strop.reward_shapings",
    "data.sampler": "strop.samplers",
    "agent.default_agent": "strop.agents",
    "agent.function_tools": "strop.tools",
    "agent.tool_format": "strop.tool_formats",
    "agent.environment.name": "strop.environments",
    "rollout.engine": "strop.rollout_engines",
    "trainer.trackers": "strop.trackers",
}
"""Keys whose values may be names of installed packages, with the group of entry points (docs/packages.md)."""
_REGISTERED_BY = {
    "advantage estimator": "strop.algorithms.advantages.registration",
    "policy loss": "strop.algorithms.losses.terms",
}
"""The module whose decorators register the built-in functions of a kind."""

PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A function or class that a key can name."""

    name: str
    """As it is registered."""
    summary: str
    """First line of its docstring."""
    papers: tuple[str, ...]
    """Papers that its docstring names."""
    settings: Mapping[str, Any]
    """Settings of its own with their defaults."""


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A key with all that is known of it."""

    key: Explanation
    """From the configuration's own tree."""
    functions: tuple[Registered, ...]
    """Registered functions and parts of installed packages that the key can name; empty for most keys."""

    def record(self) -> dict[str, Any]:
        """As one JSON object."""
        return {**asdict(self.key), "functions": [asdict(function) for function in self.functions]}


def run(args: argparse.Namespace) -> int:
    """Carry out the action."""
    if len(args.overrides) != 1:
        raise UsageError(
            "`strop config explain` takes one key, for example algorithm.clip_ratio_high; `strop config show` "
            "lists all"
        )
    explained = explain_key(args.overrides[0])
    if args.json:
        print_json(explained.record())
    else:
        print_plain("\n".join(explained_lines(explained)))
    return 0


def explain_key(key: str) -> Explained:
    """The explanation of a full key. Installed packages are not imported: of what they bring it has the names.

    Raises:
        ValueError: there is no such key; the message names the nearest one.
    """
    from strop.trainer.config import Config

    explanation = explain(Config, key, aliases=key_aliases)
    registered = {function.name: function for function in _registered(explanation.key)}
    functions = {function.name: function for function in _packaged(explanation.key)} | registered
    return Explained(key=explanation, functions=tuple(functions[name] for name in sorted(functions)))


def explained_lines(explained: Explained) -> Iterator[str]:
    """The explanation as text."""
    key = explained.key
    yield key.key
    if key.doc:
        yield _filled(key.doc)
    yield f"  type: {key.type}"
    if key.type != "section":
        yield f"  default: {_json(key.default)}"
    if key.choices:
        yield f"  choices: {', '.join(key.choices)}"
    if key.papers:
        yield f"  paper: {'; '.join(key.papers)}"
    if key.below:
        yield "  keys:"
        width = max(len(doc.key) for doc in key.below)
        for doc in key.below:
            text = textwrap.shorten(f"{_json(doc.default)}: {doc.doc}", _WIDTH, placeholder=" …")
            yield f"    {doc.key:<{width}}  {text}"
    if key.presets:
        yield _filled(f"presets: {_presets(key)}")
    if explained.functions:
        yield from _functions(explained)
    if key.type != "section":
        yield f"  defined in: {key.defined_in}"


def _presets(key: Explanation) -> str:
    if key.type == "section":
        return ", ".join(key.presets)
    return ", ".join(f"{name}: {_json(value)}" for name, value in key.presets.items())


def _functions(explained: Explained) -> Iterator[str]:
    is_about_settings = explained.key.key.endswith("_settings")
    yield "  settings by name:" if is_about_settings else "  names:"
    for function in explained.functions:
        settings = ", ".join(f"{name}={_json(default)}" for name, default in function.settings.items())
        if is_about_settings:
            if settings:
                yield f"    {function.name}: {settings}"
            continue
        papers = f" ({'; '.join(function.papers)})" if function.papers else ""
        yield _filled(f"{function.name}: {function.summary}{papers}", indent="    ")


def _registered(key: str) -> Iterator[Registered]:
    kind = REGISTRY_KEYS.get(key)
    if kind is None:
        return
    from strop.algorithms.registry import FILTERS, REWARD_SHAPINGS, Declaration
    from strop.algorithms.specs import ADV_DECLARATIONS, LOSS_DECLARATIONS
    from strop.data.curriculum import SAMPLERS

    tables = (ADV_DECLARATIONS, LOSS_DECLARATIONS, FILTERS.declarations, REWARD_SHAPINGS.declarations)
    samplers = dict.fromkeys(SAMPLERS, Declaration())  # they have no settings
    table = next((registry for registry in tables if registry.kind == kind), samplers)
    docs = {name: inspect.getdoc(function) or "" for name, function in SAMPLERS.items()}
    if kind in _REGISTERED_BY:
        docs = dict(_documented(_REGISTERED_BY[kind]))
    for name, declaration in sorted(table.items()):
        text = docs.get(name, "")
        yield Registered(
            name=name,
            summary=text.split("\n")[0].rstrip("."),
            papers=papers_in(text),
            settings={
                setting: default for setting, default in declaration.options.items() if default is not None
            },
        )


def _packaged(key: str) -> Iterator[Registered]:
    """Names that installed packages bring for a key."""
    for name, entries in packaged(PACKAGE_KEYS.get(key, "")).items():
        packages = packages_of(entries)
        kind = "package" if len(packages) == 1 else "packages"
        summary = f"of the installed {kind} {', '.join(packages)}"
        yield Registered(name=name, summary=summary, papers=(), settings={})


def _documented(registered_by: str) -> Iterator[tuple[str, str]]:
    """Names that functions implement by the decorators of a module, with the docstring of each. Read from the source:
    importing it takes seconds."""
    for path in (PACKAGE / "algorithms").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if f"from {registered_by} import" not in source:
            continue
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        for function in functions:
            for decorator in function.decorator_list:
                match decorator:
                    case ast.Call(func=ast.Name(id="implements" | "implements_outcome"), args=names):
                        for name in names:
                            assert isinstance(name, ast.Constant), "names stand in the decorator"
                            yield str(name.value), ast.get_docstring(function) or ""


def _filled(text: str, indent: str = "  ") -> str:
    return textwrap.fill(
        text,
        width=_WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
