"""The library as three lines of Python: what the commands do, with functions, datasets and models of the caller's.

training.py     train, sft, evaluate: what is brought is written down, and the run is the one that the command makes
toolkit.py    Pieces: prompts, play, columns, updates, weights, for a loop of one's own
inputs.py   functions, datasets and loaded models as files, which processes of a run can read
results.py   Result: how it ended, with samples, metrics, model and picture
live_plot.py   a live picture in a notebook
"""
