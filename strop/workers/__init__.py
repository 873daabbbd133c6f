"""Roles, each its own class of workers: a model, and what the algorithm asks of it.

config.py        ActorConfig, ReferenceConfig
actor.py         ActorWorker: the policy; log-probs, policy updates, and the advantages of a batch
reference.py     ReferenceWorker: the frozen model that KL terms compare with
(further roles, such as a critic or a reward model: strop.workers)
rollout.py       RolloutWorker: plays prompts, makes training rows and saved samples of episodes;
                 engine_group.py: the engines that it has

What they share: models.py (a role with a model, and one that learns), rows.py (rows of a batch, and what an optimizer
step on them came to), estimates.py (advantages), summary.py (what the controller keeps of a
batch).

Playing, for training, validation and every command alike: player.py (Player: engine, agents and scorers of one
process; agent_pool/: episodes in processes of their own), episodes.py (Episode, and its training rows),
reports.py (episodes without their tokens), metrics.py (numbers of episodes).
strop.trainer.async_rollout plays episodes over several calls.
"""
