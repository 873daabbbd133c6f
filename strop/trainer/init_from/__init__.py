"""A run that begins with the weights of another one.

weights.py       what it takes over, which lies in its own folder
options.py       `--from RUN[@STEP|@best]`; init_from.py: what it asks for
naming.py        RUN: the run, or its checkpoint, that is meant
"""
