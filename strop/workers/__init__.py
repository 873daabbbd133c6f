"""Roles, each its own class of workers: a model, and what the algorithm asks of it.

actor.py               The policy
config.py              Configuration of the roles
correction_columns.py  Rollout correction of all rows of a step, from their columns
critic.py              The critic
episodes.py            Episodes
estimates.py           Advantages of a batch, from its columns
estimator_columns.py   Columns that some estimators take
metrics.py             The numbers of a step under the names that people already chart
models.py              What the roles with a model share
off_policy_metrics.py  What is measured on the rows of a step
player.py              Playing prompts
preference.py          A model that learns from preferences
prm.py                 The implicit process reward model
progress.py            How many samples of a call have ended, while it lasts
reference.py           The frozen model that KL terms compare with
remote_weight_sync.py  Engines at the policy's weights
replayed_samples.py    Samples that were played before, in place of generation
reports.py             What the controller learns of an episode
reward_model.py        A model that scores answers
reward_shaping.py      The samples of a step by prompt, as filters see them, and what shaping makes of their rewards
role_configs.py        Sections of the configuration of the roles that are here, with what
                       strop.trainer.config.RoleSection asks of them
role_metrics.py        What further roles gave for the rows of a step
rollout.py             Generation as a role
rows.py                What the roles do alike with the rows of a batch, and what an optimizer step on them came to
sample_rows.py         Samples as rows of the sample store
sft.py                 A model that imitates
summary.py             What the controller keeps of a trained batch
teacher.py             The frozen model that the policy learns from
agent_pool/            Episodes of a rank in processes beside it (agent.num_workers)
async_rollout/         Rollout worker whose samples are played over several calls (rollout.max_staleness > 0)
tracing/               Traces of episodes
"""
