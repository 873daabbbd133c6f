"""Several runs that differ in a few settings, and one table of how they ended.

sweep.py    `strop sweep`
grid.py       from `key=a,b` to the settings of each run
running.py    one process per run, and what is left of it when the sweep is asked to end
outcomes.py   how each run ended, from its own records: table, file, picture
"""
