"""`strop quickstart`: a policy that learns, end to end, on this machine.

stages.py  The stages of `strop quickstart`
task.py    A verifiable task made on the spot
"""
