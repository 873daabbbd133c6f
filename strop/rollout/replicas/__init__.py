"""Engines that are not the native one: in processes of their own, or a user's, so that they may be lost.

client.py             Asks engines that may be lost
engine_replicas.py    The engines of one rollout worker
partial_request.py    A request that is answered in several parts
prompt_checks.py      Checks of a request before engines in processes of their own take it
router.py             Engines that generate side by side
subprocess_engine.py  Settings of an engine in another process
"""
