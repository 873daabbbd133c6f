"""Several runs that differ in a few settings, and one table of how they ended.

grid.py      From the words of a command line to the runs that they ask for
outcomes.py  Outcomes of a sweep's runs, from their own records
running.py   The runs of a sweep, each `strop train` in a process of its own, so many at a time
"""
