"""The commands.

main.py       `strop`: finds the command, prints errors as sentences, gives exit codes
terminal.py     what reaches the terminal: escaped text, JSON, the errors of the command line itself
quiet_libraries.py  the noise of libraries, and the log on the terminal
settings.py   --config and key=value, the same for every command
launching.py  what commands that make runs share: a run folder, its resume, its end
standard_error.py  standard error that cannot end a run

`unread` refuses settings that a command has no use for.

One module per command, by its name: train.py is `strop train`; others are with what they carry out. Each has
`add_arguments(parser)` and `run(args) -> int`, and imports what is heavy when it runs.
"""
