"""Migration of other libraries' settings into ours, every one of them accounted for.

    shell.py                   the commands of a launch script, with its variables filled in
    shell_words.py             its words as they are written
    shell_parameters.py        its parameter expansions
    shell_tests.py             results of its tests and of commands that name folders
    paths.py                   relative paths where it changes the folder
    python_calls.py            the keyword arguments of a Python script's calls, read and never executed
    python_names.py            what names in it stand for
    python_datasets.py         the data sets that it loads, and what becomes of their rows
    python_values.py           values that it works out, and copies of its functions
    trl_flags.py               TRL's commands with flags, and its YAML files
    source.py                   one list of settings from either, or from YAML files
    result.py, rules.py        outcomes of the migration of a setting, and the rules that give them
    tables.py                  tables of rows, and their application to settings
    flags.py                   the flags of a launch script
    engines.py                 settings of vLLM and SGLang, of every library
    variables.py               variables of the environment that a script gives to its processes
    openrlhf_names.py          flags with dots under the names that their rows have
    verl.toml, verl_sft.toml, trl.toml, openrlhf*.toml     the rows
    verl*.py, trl*.py, openrlhf.py                         rules that depend on several settings

Whether the keys that the tables produce exist, and the values fit, is for the command to check.
"""

from __future__ import annotations

from strop.compat.migrate.flags import PROGRAMS, read_openrlhf
from strop.compat.migrate.openrlhf import migrate_openrlhf
from strop.compat.migrate.paths import moved
from strop.compat.migrate.python_calls import read_calls
from strop.compat.migrate.source import Found, read_verl
from strop.compat.migrate.tables import Migration, Row
from strop.compat.migrate.trl import COMMANDS, migrate_trl
from strop.compat.migrate.trl_flags import read_trl
from strop.compat.migrate.verl import migrate_verl, migrate_verl_sft, verl_command

__all__ = [
    "COMMANDS",
    "PROGRAMS",
    "Found",
    "Migration",
    "Row",
    "migrate_openrlhf",
    "migrate_trl",
    "migrate_verl",
    "migrate_verl_sft",
    "moved",
    "read_calls",
    "read_openrlhf",
    "read_trl",
    "read_verl",
    "verl_command",
]
