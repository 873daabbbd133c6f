"""`strop doctor`: what is wrong with machines, with a run, and with rollout engines.

doctor.py   the command, and what is looked at on the machines of a cluster
survey.py    what the machines of a cluster are like
sockets.py   what the processes of a run listen on, and who can speak there
"""
