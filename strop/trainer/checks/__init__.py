"""Rules across sections of the configuration, checked before a device is touched.

algorithms.py        Settings that do not go with the estimators that are here
async_rollout.py     Settings of generation ahead of training that do not go together, or not with the others
dynamic_sampling.py  Settings that do not go with dynamic sampling
media.py             What images of prompts do not go with
parallel.py          Numbers of ranks that the engine of a role cannot have
recording.py         Recorded samples that are trained on
roles.py             Settings that do not go with the roles that are here
sections.py          What settings of several sections ask of each other
"""
