"""Steps that choose what they play: rounds until enough groups can teach, and long prompts first.

check.py      Settings that do not go with dynamic sampling
collector.py  Dynamic sampling (DAPO)
lengths.py    How long the answers to a prompt were at its earlier visits, and which prompts to begin with
"""
