"""The settings of a run, what they mean, and where two runs differ in theirs: `strop config`.

diff.py     `strop config diff`
explain.py  `strop config explain`
keys.py     Everything there is to say about one key of a configuration
"""
