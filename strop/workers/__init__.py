"""Roles, each its own class of workers: a model, and what the algorithm asks of it.

actor.py               The policy
config.py              Sections of the configuration of each role
correction_columns.py  Rollout correction of all rows of a step, from their columns
critic.py              The critic
episode_scores.py      Scores of episodes
episodes.py            Episodes
estimates.py           Advantages of all rows of a step, from their columns
estimator_columns.py   Columns that some estimators take
generation_waits.py    Seconds of a call of generation that it would not have needed
metrics.py             The numbers of a step under the names that people already chart
models.py              Base classes of the roles with a model
off_policy_metrics.py  Metrics of the rows of a step
player.py              Episode runner
preference.py          A model that learns from preferences
prm.py                 The implicit process reward model
progress.py            Progress of a rollout call
reference.py           The frozen model that KL terms compare with
rehearsal.py           Rehearsal of an update
replayed_samples.py    Samples that were played before, in place of generation
reports.py             Reports of episodes for the controller
reward_model.py        A model that scores answers
reward_shaping.py      The samples of a step by prompt, as filters see them, and what shaping makes of their rewards
role_metrics.py        Metrics of reward model and process reward model over the rows of a step
rollout.py             Generation as a role
routers.py             Losses of a model's routers, and the loads of its experts
rows.py                Helpers shared by all workers
sample_rows.py         Samples as rows of the sample store
sft.py                 A model that imitates
staleness_metrics.py   Staleness of the samples of a step
summary.py             Summary of a trained batch for the controller
teacher.py             The frozen model that the policy learns from
agent_pool/            Episodes of a rank in processes beside it (agent.num_workers)
async_rollout/         Rollout worker whose samples are played over several calls
tracing/               Traces of episodes
"""
