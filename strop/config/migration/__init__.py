"""Settings of other libraries into ours, every one of them accounted for.

    shell.py         the commands of a launch script, with its variables filled in
    python_calls.py  the keyword arguments of a Python script's calls, read and never executed
    found.py         one list of settings from either, or from YAML files
    rules.py         what a row of a table can say, and how a table is applied
    values.py        conversions that several tables use
    verl.py, verl_sft.py, trl.py     the tables

The tables hold plain text: this room knows no other, so whether the keys they produce exist, and the values fit,
is for the command to check.
"""

from __future__ import annotations

from strop.config.migration.found import Found, read_verl
from strop.config.migration.python_calls import read_calls
from strop.config.migration.rules import Migration, Row
from strop.config.migration.trl import migrate_trl
from strop.config.migration.verl import migrate_verl

__all__ = ["Found", "Migration", "Row", "migrate_trl", "migrate_verl", "read_calls", "read_verl"]
