"""Episodes of a rank in processes beside it (agent.num_workers).

`pool` starts the processes and hands episodes out, `child` is what runs in one, `wire` is what passes between them.
"""
