"""Learning from a teacher, beside rewards or without them.

terms.py  terms that pull the policy towards it
"""
