"""What a person looks at of a run that was recorded.

page/             `strop view`: a local web page over runs
runs.py           `strop runs`: all runs below a folder in a table; plot.py `strop plot`: their curves as a picture
records.py        metrics and events of a run as they grow; summary.py a run in a few numbers; curves.py columns
samples.py        `strop samples`: what the model wrote, with rewards
token_view.py     one answer token by token; turn_view.py one episode turn by turn
filtered.py        what became of every sample, and why
diff.py           `strop diff`: where two runs part
postmortem.py       `strop incident`: how a run ended, or where it hangs
"""
