"""Views of a recorded run, for `strop view` and commands that show runs.

page/             `strop view`: a local web page over runs
records.py        metrics and events of a run as they grow; summary.py a run in a few numbers; curves.py columns
plot.py           curves of runs as a picture
samples.py        samples of a run: found, put in order, and shown on a terminal
token_view.py     one answer token by token; turn_view.py one episode turn by turn
filtered.py       what became of every sample, and why
diff.py           comparison of two runs
postmortem.py     incident report: how a run ended, or where it hangs
"""
