"""Samples that rollout workers play over several calls: generation ahead of training, and steps that do not wait for
their slowest (rollout.max_staleness, rollout.over_issue). The controller's half is
strop.trainer.collectors.

worker.py       AheadWorker: begins prompts, and gives those that have ended
in_flight.py    groups that are played over several calls
generation_cache.py     answers of the engines, kept until their samples are trained; score_cache.py: their scores;
                saved_group.py: both of a group, as a checkpoint has them
recorded_schedule.py    the versions that sampled each request of a run that is repeated
in_play.py      the file of a checkpoint that keeps them
check.py        settings that do not go together
"""
