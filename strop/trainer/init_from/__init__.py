"""A run that begins with the weights of another one.

options.py  `--from RUN` and `--with-optimizer`, of commands that make runs
weights.py  A run that begins with the weights of another one
"""
