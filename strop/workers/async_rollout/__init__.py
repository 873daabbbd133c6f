"""Rollout worker whose samples are played over several calls (rollout.max_staleness > 0).

begun.py              Groups that were begun for steps to come, and those of them that a step leaves out
in_flight.py          Groups of samples that are played over several calls of a rollout worker
in_play.py            The file of a checkpoint that holds what was generated for the prompts of no step yet, one a
                      line
journal.py            What was generated for episodes that have not been trained
kept.py               What is known of a group that is in play, by which it can go on in another process
recorded_schedule.py  Requests that wait for the weights that sampled them before
score_journal.py      Scores of samples that have not been trained
worker.py             Generation whose samples are played over several calls, or by a clock that counts engine steps
"""
