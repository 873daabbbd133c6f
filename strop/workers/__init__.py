"""Roles: an engine and a loss behind `@register`, each its own class.

config.py     ActorConfig, ReferenceConfig
actor.py      ActorWorker: the policy; log-probs and policy updates
reference.py  ReferenceWorker: the frozen model that KL terms compare with
"""
