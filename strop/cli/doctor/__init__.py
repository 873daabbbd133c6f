"""`strop doctor`: what is wrong with machines, with a run, and with rollout engines.

engines.py  `strop doctor --engines`
survey.py   What each machine of a cluster is
"""
