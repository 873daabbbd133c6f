"""The commands.

completion.py      `strop completion`
eval_table.py      `strop eval` of several models
init_from.py       Initialization from another run
launching.py       Launching of runs, shared by commands
main.py            `strop`
model_argument.py  MODEL_OR_RUN and `--step` of commands that let a model answer
run_kinds.py       Kinds of runs, by the command that makes them
settings.py        Settings on the command line
unused_keys.py     Settings that a command has no use for
versions.py        Installed packages and extras for `strop --version` and others
check_functions/   `strop check loss` and `strop check estimator`
commands/          Commands of `strop`, one module each
doctor/            `strop doctor`
explain/           The settings of a run, what they mean, and where two runs differ in theirs
quickstart/        `strop quickstart`
sharing/           Sharing a trained model on a hub or in a store
sweep/             Several runs that differ in a few settings, and one table of how they ended

`unread` refuses settings that a command has no use for.
"""
