"""The settings of a run, what they mean, and where two runs differ in theirs: `strop config`.

diff.py     `strop config diff`
explain.py  `strop config explain`
"""
