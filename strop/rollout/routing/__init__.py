"""One router over the engines of all rollout workers of a run: work moves from the busy ones to the idle ones.

Agents and scorers of an episode stay with the worker that was given its prompt. Its requests begin at the engine of
that worker, go on to another one where that has room or nothing to do, and are taken over behind the tokens that were
heard of. Tokens go from worker to worker; the router, in the process of the controller, hears of places alone.

table.py   the load of each replica, and decisions: where a request goes, waits, or goes on
router.py  Router: keeps the table for workers in other processes
client.py  RoutedClient: client of a worker's agents
peers.py   requests to engines of other workers
wire.py    frames of JSON between them
"""
