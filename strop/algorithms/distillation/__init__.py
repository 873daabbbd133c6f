"""Learning from a teacher, beside rewards or without them.

config.py  what a user sets about it (torch-free)
terms.py     terms that pull the policy towards it
"""
