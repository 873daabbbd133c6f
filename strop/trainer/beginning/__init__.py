"""A run that begins with the weights of another one.

weights.py       what it takes over, which lies in its own folder
command_line.py  `--from RUN[@STEP|@best]`
naming.py        RUN: the run, or its checkpoint, that is meant
"""
