"""Views of a recorded run, for `strop view` and commands that show runs.

curves.py      Metrics of a run as columns over steps, samples, tokens or hours
diff.py        Comparison of two runs
filtered.py    Fates of all samples: `strop samples RUN --why-dropped`
plot.py        Curves of one or several runs as a picture
postmortem.py  Incident report: how a run ended, or where it hangs
records.py     Metrics and events of a run as they grow
samples.py     Samples of a run
summary.py     One run in a few numbers, and what tells several runs apart
token_view.py  One trajectory token by token
turn_view.py   One episode turn by turn
page/          A local web page over run folders
"""
