"""Roles, each its own class of workers: a model, and what the algorithm asks of it.

config.py        ActorConfig, ReferenceConfig, TeacherConfig, CriticConfig, RewardModelConfig
actor.py         ActorWorker: the policy; log-probs, policy updates, and the advantages of a batch
critic.py        CriticWorker: values and value updates
reference.py     ReferenceWorker: the frozen model that KL terms compare with
teacher.py       TeacherWorker: the frozen model that the policy learns from
reward_model.py  RewardModelWorker: scores of whole answers
rollout.py       RolloutWorker: plays prompts with agents, engine and scorers
supervised.py    SupervisedWorker: fine-tuning on given answers

What they share: rows.py (rows of a batch), joining.py (the ranks of a role), saving.py (state of a role that
learns), frozen.py (a model that does not), estimates.py (advantages), summary.py (what the controller keeps of a
batch), episodes.py and reports.py (what was played).
"""
