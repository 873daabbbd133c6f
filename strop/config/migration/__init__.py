"""Settings of other libraries into ours, every one of them accounted for.

    shell_words.py, shell.py   the commands of a launch script, with its variables filled in
    python_calls.py            the keyword arguments of a Python script's calls, read and never executed
    found.py                   one list of settings from either, or from YAML files
    outcomes.py, rules.py      what can become of a setting, and the rules that say it
    tables.py                  a table's rows, and how it is applied
    values.py                  conversions that several tables use
    verl/, trl/                the tables, one module for each group of the other library's configuration

The tables hold plain text: this room knows no other, so whether the keys they produce exist, and the values fit,
is for the command to check.
"""

from __future__ import annotations

from strop.config.migration.found import Found, read_verl
from strop.config.migration.python_calls import read_calls
from strop.config.migration.tables import Migration, Row
from strop.config.migration.trl import migrate_trl
from strop.config.migration.verl import migrate_verl, migrate_verl_sft

__all__ = [
    "Found",
    "Migration",
    "Row",
    "migrate_trl",
    "migrate_verl",
    "migrate_verl_sft",
    "read_calls",
    "read_verl",
]
