"""The library as three lines of Python: what the commands do, with functions, datasets and models of the caller's.

arguments.py  Arguments of the functions that users call
callbacks.py  Per-step callbacks of a caller
calls.py      The frame of a call that makes a run: its folder, its beginning or continuation, and interrupts
inputs.py     Functions, datasets and loaded models as files, which processes of a run can read
live_plot.py  Live plot of a run in a notebook
overrides.py  Settings that a caller gives in Python, as overrides of the command line
results.py    Results of strop.train, strop.sft and strop.evaluate
toolkit.py    Pieces: prompts, rollout, columns, updates, weights, for a custom training loop
training.py   strop.train, strop.sft, strop.evaluate: inputs are written down, and the run is the one of the command
"""
