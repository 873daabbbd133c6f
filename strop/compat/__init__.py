"""Compatibility with verl, TRL and OpenRLHF.

key_aliases.py  Aliases: our keys for keys of verl, TRL and OpenRLHF
migrate/        Migration of other libraries' settings into ours, every one of them accounted for
"""
