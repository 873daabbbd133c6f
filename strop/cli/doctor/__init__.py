"""`strop doctor`: what is wrong with machines, with a run, and with rollout engines.

engines.py  `strop doctor --engines`
survey.py   Survey of a cluster's machines
"""
