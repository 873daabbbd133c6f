"""`strop doctor`: what is wrong with machines, with a run, and with rollout engines.

command.py   the command, and what is looked at on the machines of a cluster
engines.py   a live check of the installed rollout engines
survey.py    what the machines of a cluster are like
"""
