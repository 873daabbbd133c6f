"""Rollout worker whose samples are played over several calls (rollout.max_staleness or rollout.over_issue).

generation_cache.py   Cache of the answers of episodes that have not been trained
in_flight.py          Groups of samples in flight over several calls of a rollout worker
in_play.py            The file of a checkpoint that holds what was generated for the prompts of no step yet, one a
                      line
recorded_schedule.py  Requests that wait for the weights that sampled them before
saved_group.py        State of a group in flight, with which it goes on in another process
score_cache.py        Scores of samples that have not been trained
worker.py             Asynchronous rollout worker
"""
