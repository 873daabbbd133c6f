"""`strop doctor`: what is wrong with machines, with a run, and with rollout engines.

engines.py  `strop doctor --engines`
listing.py  All sockets of some processes that listen, from the system's own tables
sockets.py  `strop doctor RUN --sockets`
survey.py   What each machine of a cluster is
"""
