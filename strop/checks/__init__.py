"""What a person wants checked before a run: functions of their own, environments, files of data.

A guest: it uses the core and is never used by it (guest.toml says where it joins).

    functions/               the rules that policy losses and advantage estimators keep: `strop check`
    environments.py          an environment and scripted players: `strop env check`
    environments_of_run.py   the same of the environments that a run will play, before its first step
    data_command.py          `strop data check`; data_files.py: rows, lengths, repeats

Nothing is imported here: a command imports what it needs.
"""
