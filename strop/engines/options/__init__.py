"""What a user changes about a model folder without writing into it.

changes.py  settings, chat template, modules of their own
exact.py    norms in float64
"""
