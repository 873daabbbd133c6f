"""Samples that rollout workers play over several calls: generation ahead of training, and steps that do not wait for
their slowest (rollout.max_staleness, rollout.over_issue, rollout.overlap_log_probs). The controller's half is
strop.trainer.collectors.

worker.py       AheadWorker: begins prompts, and gives those that have ended
in_flight.py    groups that are played over several calls
journal.py, score_journal.py    what was generated for them, and their scores; kept.py: as a checkpoint has it
recorded_schedule.py            a recorded run made again
in_play.py      the file of a checkpoint that keeps them
overlap.py      what models say of groups while others are played
check.py        settings that do not go together
"""
