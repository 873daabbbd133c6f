"""Roles, each its own class of workers: a model, and what the algorithm asks of it.

config.py        ActorConfig, ReferenceConfig
actor.py         ActorWorker: the policy; log-probs, policy updates, and the advantages of a batch
reference.py     ReferenceWorker: the frozen model that KL terms compare with
(critic, teacher, reward model and process reward model: strop.roles)
rollout.py       RolloutWorker: plays prompts, makes training rows and saved samples of episodes;
                 generation.py: the engines that it has

What they share: models.py (a role with a model, and one that learns), rows.py (rows of a batch, and what an optimizer
step on them came to), estimates.py (advantages), summary.py (what the controller keeps of a
batch).

Playing, for training, validation and every command alike: player.py (Player: engine, agents and scorers of one
process; agents/: episodes in processes of their own), episodes.py (Episode, and its training rows),
reports.py (episodes without their tokens), metrics.py (numbers of episodes).
strop.ahead plays episodes over several calls.
"""
