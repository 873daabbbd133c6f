"""Samples that are played over several calls: generation ahead of training, steps that do not wait for their slowest,
and a clock of engine steps (rollout.max_staleness, rollout.over_issue, rollout.overlap_log_probs, trainer.clock).

joining.py      what the trainer is given of it; check.py: settings that do not go together;
                settings.py: the clock

In the controller
collector.py    samples that are made while the trainer works; calls.py: what it has rollout workers do
over_issue.py   steps that do not wait for their slowest
clocked.py      steps that wait for all of theirs, by a clock that counts engine steps
pacing.py       how far ahead, and which groups a step takes
begun.py        groups of steps to come, and those left out; replacing.py: how many are begun for these
in_play.py      what a checkpoint keeps of them
overlap.py      what models say of them meanwhile

In a rollout worker
worker.py       AheadWorker: begins prompts, and gives those that have ended
in_flight.py    groups that are played over several calls
journal.py, score_journal.py    what was generated for them, and their scores; kept.py: as a checkpoint has it
recorded_schedule.py            a recorded run made again
step_clock.py                   engine steps as time; virtual_time.py: how many things take
"""
