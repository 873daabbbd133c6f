"""Guests: rooms that use the core, and that the core finds by what they declare.

A guest is a package below strop/, or below a room of it, with a file guest.toml that says where it joins the core: at
hooks, and at places where what joins has names.

    "rows that come later" = "strop.data.growing.growth:Growth"

    [section]
    "reward.sandbox" = "strop.sandbox.config:SandboxConfig"

Behind each is an object: `module:attribute`, or a module. Nothing is imported before the core asks for it, so a command
that only reads settings stays quick; and where the folder of a guest is taken away, the core works without it.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent

HOOKS = {
    "trackers": "a module as strop.tracking.group, for trackers beside the metrics file",
}
"""Where a guest joins with one thing: what it is."""

PLACES = {
    "section": "full key of a section of the configuration: its dataclass, with code_named() where it names code "
    "(strop.base.sections); a role has one at the root, by its name (strop.trainer.config.RoleSection)",
    "settings": "full key of a section and a word for them: a dataclass whose fields are among those of the section",
    "changeable settings": "what they are about: full keys of settings that a run may be continued with anew",
    "steering settings": "the same, of those that change what it does from there on; `how long …` end it",
    "command": "word after `strop`: a module with SUMMARY, add_arguments(parser) and run(args); one that makes runs "
    "has a section at the root, by its name (strop.cli.launching)",
    "data command": "word after `strop data`: its strop.data.command.Action",
    "reward service": "full key of a section below reward: a class, called as (section, rank=, count=), that scores "
    "answers (strop.judges.services.RewardService)",
    "reward worker": "full key of a section below reward: a function that each process that scores calls as it starts, "
    "with the section as plain data",
    "reward form": "a parameter that tells a calling convention: (function, as it was loaded, setup) -> the function",
    "reward loader": "what scores in place of a function of the user's (`built-in scorer`, `manager`): a function from "
    "its setup to a strop.rewards.functions.RewardFunction",
    "tracker": "name of a tracker: a strop.tracking.group.TrackerFactory, with check(), which raises a ValueError "
    "where what it needs is missing",
    "elsewhere": "models, rows or runs: the module that fetches, or sends, what names and URLs "
    "mean that are not of this machine (strop.base.elsewhere)",
    "agent": "name of an agent: the async function (prompt, trajectory, generate, context) that plays it",
    "self-scoring agent": "name of an agent that is given no tools and scores its episodes itself: as above",
    "form of agents": "what agents can be beside async functions: a function from such an object to the async function "
    "that plays it, or None for objects of another form",
    "agent kit": "what agents of this run find in their context, as an attribute of this name: a strop.agents.kits.Kit",
    "agent processes": "full key of the setting that asks for them: a strop.workers.agents.pool.AgentWorkers, called "
    "as (setup, client, model, reward=, seed=)",
    "episode observer": "full key of a section below rollout: a function (section, tokenizer) that gives what hears of "
    "every episode (strop.workers.player.EpisodeObserver), or None",
    "optimizer": "name in optim.name: a function (named parameters, config, names of embeddings) that gives its parts "
    "(strop.engines.optimizer.Part)",
    "runtime": "name in resources.runtime of what runs the roles in processes of their own: a function (resources, "
    "log_dir=) that gives a strop.controller.Runtime",
    "role": "name of a role with a model, as it is in the configuration: a module as strop.trainer.roles.JoinedRole "
    "describes",
    "rollout engine": "name in rollout.engine of an engine in processes of its own: an async function from a "
    "strop.workers.generation.Place to its Generation; its settings are a section of that name below rollout, a "
    "strop.rollout.config.OwnProcesses",
    "remote model": "name in rollout.engine of a server whose weights are not ours: a module as "
    "strop.evaluation.alone.Answering describes; its settings are a section of that name below rollout, a "
    "strop.rollout.config.RemoteModel",
    "form of a batch": "a form that a strop.protocol.DataProto is brought into and made from: its module "
    "(strop.protocol.forms)",
    "evaluation set": "a name, or the beginning of names with a / at its end: a function (name, source) that gives the "
    "rows of that set with its prompts and data_source; an empty source is where it is published",
    "generation ahead": "for samples that are played over several calls, or by a clock of engine steps "
    "(strop.trainer.config.Config.ahead_by): `asked`, a function (config) that gives the setting of its own which asks "
    "for that; `check`, a function (config); `role`, a function (config, playing) that "
    "gives the RoleSpec of the rollout role; `collector`, a function that gives a "
    "strop.trainer.collecting.RolloutCollector, with the arguments of one and (start_step=, recorded=)",
}
"""Where a guest joins with names: what they are, and what is behind them."""


@cache
def guests() -> tuple[str, ...]:
    """The guests that are there, by their folder below strop/, in alphabetical order."""
    found = (*PACKAGE.glob("*/guest.toml"), *PACKAGE.glob("*/*/guest.toml"))
    return tuple(sorted(path.parent.relative_to(PACKAGE).as_posix() for path in found))


@cache
def targets(place: str) -> Mapping[str, str]:
    """What joins at a place, in the order of the guests: each name and where its object is; nothing is imported. At a
    hook, the names are those of the guests.

    Raises:
        ValueError: a guest joins at a place that there is not, or two give the same name.
    """
    known = HOOKS | PLACES
    assert place in known, f"{place} is no place where guests join"
    found: dict[str, str] = {}
    for guest in guests():
        joins = tomllib.loads((PACKAGE / guest / "guest.toml").read_text(encoding="utf-8"))
        for unknown in joins.keys() - known.keys():
            raise ValueError(f"the guest {guest} joins at {unknown!r}; a guest joins at {', '.join(known)}")
        entries = joins.get(place, {})
        if isinstance(entries, str):
            entries = {guest: entries}
        for name, target in entries.items():
            if name in found:
                raise ValueError(f"two guests join at {place!r} as {name!r}: {found[name]} and {target}")
            found[name] = target
    return found


def joined(place: str, name: str) -> Any:
    """The object that joins at a place under a name; KeyError where there is none."""
    module, _, attribute = targets(place)[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def all_joined(place: str) -> dict[str, Any]:
    """Everything that joins at a place, by name."""
    return {name: joined(place, name) for name in targets(place)}


def optional(place: str) -> Any:
    """What joins at a place where one is enough: the first; None where nothing does."""
    return next((joined(place, name) for name in targets(place)), None)


def needed(place: str, why: str, name: str = "") -> Any:
    """What joins at a place where one is enough: the first.

    Args:
        place: of `HOOKS` or `PLACES`.
        why: who needs it, the beginning of a sentence.
        name: under which it joins, where one guest joins under several.

    Raises:
        ValueError: nothing joins there.
    """
    for found in targets(place):
        if name in ("", found):
            return joined(place, found)
    raise ValueError(
        f"{why}, but the part of strop for that is missing from this installation ({place}); install all of strop"
    )
