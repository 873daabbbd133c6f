"""Roles beside actor, reference and rollout.

critic.py           CriticWorker: values and value updates
value_loss.py       its loss as per-token terms, and the variance that values explain
gae.py              the estimator that takes values
value_models.py     models with a value head
teacher.py          TeacherWorker: the frozen model that the policy learns from
reward_model.py     RewardModelWorker: scores of whole answers
prm.py              PrmWorker: the process reward model, which learns from outcomes
implicit_reward.py  its rewards of tokens, and its loss
prime.py            the estimator that takes them, and what it is judged by
estimators.py       both estimators
declarations.py     what they ask for; checks.py: settings that do not go with these roles (both torch-free)

measures.py         what they gave, as metrics
settings.py         their sections of the configuration (torch-free)
"""
