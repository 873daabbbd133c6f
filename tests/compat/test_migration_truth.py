"""What the rows of the tables say, held against what strop's commands have and read."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from test_migration_tables import TABLES, answers

from strop.cli.commands import prefer, sft
from strop.cli.main import COMMANDS as OF_STROP
from strop.cli.main import command_parser
from strop.cli.unused_keys import OF_TRAINING, Reads
from strop.compat.migrate.flags import Flags
from strop.compat.migrate.openrlhf import migrate_openrlhf
from strop.compat.migrate.result import ACCOUNTED, Facts, Outcome, UnreadableError
from strop.compat.migrate.tables import Migration
from strop.compat.migrate.trl import COMMANDS, KINDS, migrate_trl
from strop.compat.migrate.verl import migrate_verl
from strop.config import ConfigError, config_of, to_flat_dict
from strop.trainer.config import Config

COMMAND = dict.fromkeys(TABLES, "train") | COMMANDS | {"verl-sft": "sft", "openrlhf-sft": "sft"}
COMMAND |= dict.fromkeys(("openrlhf-dpo", "openrlhf-kto", "openrlhf-rm"), "prefer")
READ_BY: dict[str, Reads] = {"train": OF_TRAINING, "sft": sft.READS, "prefer": prefer.READS}
SETTINGS: dict[str, Any] = to_flat_dict(Config())
KEY = re.compile(r"(?<![\w./@])[a-z_]\w*(?:\.[A-Za-z_]\w*)+(?![\w/(])")
FILES = (".py", ".json", ".jsonl", ".md", ".yaml", ".parquet", ".jinja")
CALLED = re.compile(r"strop ([a-z]+)((?: --[a-z-]+)*)")
OFF = ("algorithm.loss_agg_mode", "model.lora.alpha", "critic.lora.alpha")
"""Defaults of ours that hold where nothing is set: chosen with the loss, and not read without a rank."""
OTHER_MATTERS = (
    "path",
    "name",
    "enable",
    "mode",
    "backend",
    "format",
    "num_workers",
    "max_concurrent",
    "sequence_parallel",
)
"""Names that stand for something else in every section."""


@functools.cache
def answered(name: str) -> dict[str, list[Outcome]]:
    """All answers of a table by its keys, without those that take no plain value."""
    return {
        key: [outcome for _, outcome in answers(TABLES[name], key)]
        for key in TABLES[name].rules
        if not key.endswith(("reward_funcs", "processes")) and "*" not in key
    }


@functools.cache
def sentences(name: str) -> tuple[tuple[str, str], ...]:
    """(key, what is said about it), from rows and from answers."""
    parts = ("note", "refuse", "lack", "else", "instead", "noted", "not_needed", "not_there", "refused")

    def said() -> Iterator[tuple[str, str]]:
        for key, row in TABLES[name].rows.items():
            words = [*(row.get(part) for part in parts), *row.get("only_if", [])[1:]]
            yield from ((key, text) for text in words if isinstance(text, str))
        for key, found in answered(name).items():
            yield from ((key, outcome.note) for outcome in found if outcome.note)

    return tuple(dict.fromkeys(said()))


def is_read(word: str, command: str) -> bool:
    """The command reads a setting or section of that name, whole or without its first parts, or an entry of one."""
    reads = [key for key in SETTINGS if READ_BY[command].covers(key)]
    below = [key for key, value in SETTINGS.items() if isinstance(value, dict) and word.startswith(f"{key}.")]
    return any(key in reads for key in below) or any(f".{word}." in f".{key}." for key in reads)


def is_theirs(word: str, name: str) -> bool:
    """A key or section of the other library, whole or without its first parts."""
    return any(f".{word}." in f".{key}." for key in TABLES[name].rows)


def problem_of(settings: dict[str, Any]) -> str:
    """Why a configuration does not load; empty where it does."""
    try:
        config_of(Config, settings)
    except ConfigError as error:
        unused = "nothing has a use for it"
        return unused if unused in str(error) else str(error)
    return ""


def has(name: str) -> bool:
    """Something can be imported by that name."""
    module, _, item = name.rpartition(".")
    return hasattr(importlib.import_module(module), item)


@pytest.mark.parametrize("name", TABLES)
def test_what_is_translated_is_read_by_the_command(name: str) -> None:
    for key, found in answered(name).items():
        unread = {ours for one in found for ours in one.ours if not READ_BY[COMMAND[name]].covers(ours)}
        assert unread == set(), f"{key}: `strop {COMMAND[name]}` does not read {unread}"


@pytest.mark.parametrize("name", TABLES)
def test_a_setting_that_a_sentence_names_is_read_by_the_command(name: str) -> None:
    wrong = [
        (key, word)
        for key, text in sentences(name)
        for word in KEY.findall(text)
        if not word.endswith(FILES)
        and not (
            has(word) if word.startswith("strop.") else is_read(word, COMMAND[name]) or is_theirs(word, name)
        )
    ]
    assert wrong == []


@pytest.mark.parametrize("name", TABLES)
def test_a_command_that_a_sentence_names_is_the_one_that_runs_and_has_the_options(name: str) -> None:
    for key, text in sentences(name):
        for called, options in CALLED.findall(text):
            if options or called in {command.split()[0] for command in OF_STROP}:
                assert called in OF_STROP, (key, text)
                assert called not in READ_BY or called == COMMAND[name], (key, text)
                known = command_parser(called)[0].format_help()
                assert [option for option in options.split() if option not in known] == [], (key, text)


@pytest.mark.parametrize("name", TABLES)
def test_what_strop_has_by_the_same_name_is_set_or_named(name: str) -> None:
    """A row that only refuses or waves off a key, while there is a setting of that very name."""
    names = {key.rpartition(".")[2] for key in SETTINGS if READ_BY[COMMAND[name]].covers(key)}
    wrong = [
        key
        for key, found in answered(name).items()
        if (last := key.rpartition(".")[2]) in names
        and last not in OTHER_MATTERS
        and "noted" not in TABLES[name].rows[key]
        and not any(outcome.ours for outcome in found)
        and not any(is_read(word, COMMAND[name]) for outcome in found for word in KEY.findall(outcome.note))
    ]
    assert wrong == []


@pytest.mark.parametrize("name", TABLES)
def test_every_name_that_a_row_chooses_is_accepted(name: str) -> None:
    for key, row in TABLES[name].rows.items():
        choice = row.get("choice", ())
        for value in choice.values() if isinstance(choice, dict) else choice:
            nested = functools.reduce(
                lambda inside, part: {part: inside}, reversed(row["to"].split(".")), value
            )
            assert problem_of(nested) in ("", "nothing has a use for it"), key


MIGRATED: dict[str, Migration] = {
    "verl": migrate_verl([]),
    **{kind: migrate_trl([], kind) for kind in KINDS},
    "openrlhf": migrate_openrlhf(Flags(program="train_ppo_ray", found=())),
    **{
        f"openrlhf-{name}": migrate_openrlhf(Flags(program=f"train_{name}", found=()))
        for name in ("sft", "dpo", "kto", "rm")
    },
}
"""A script that sets nothing."""


@pytest.mark.parametrize("name", MIGRATED)
def test_a_script_that_sets_nothing_has_the_defaults_of_its_library(name: str) -> None:
    table, written = TABLES[name], config_of(Config, MIGRATED[name].values)
    facts, flat = Facts({}, table.defaults), to_flat_dict(written)
    for key, value in table.defaults.items():
        if key in table.rules:
            for ours, expected in table.rules[key](key, value, facts).ours.items():
                assert flat[ours] == expected or ours in OFF, key


@pytest.mark.parametrize("name", TABLES)
def test_every_condition_of_a_row_can_be_asked(name: str) -> None:
    table = TABLES[name]
    facts = Facts({}, table.defaults)
    for key, row in table.rows.items():
        if "only_if" in row:
            with contextlib.suppress(UnreadableError):
                assert table.rules[key](key, 1, facts).status in ACCOUNTED, key
