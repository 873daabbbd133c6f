"""How an engine with weights of its own holds those of the policy.

target.py    WeightTarget: an engine's live parameters
transfer.py  what brings them to rollout workers in other processes, as the workers use it
types.py     Endpoint, SyncReport, Probe, the errors
"""
