"""Samples that are played over several calls: generation ahead of training, steps that do not wait for their slowest,
and a clock of engine steps (rollout.max_staleness, rollout.over_issue, rollout.overlap_log_probs, trainer.clock).

calls.py         What the controller has rollout workers do over several calls
check.py         Settings of generation ahead of training that do not go together, or not with the others
clocked.py       Steps whose time is counted in steps of the engine
collector.py     Samples that are made while the trainer works
joining.py       What the trainer is given where samples are played over several calls
over_issue.py    Steps that begin more prompts than they train, and do not wait for the slowest
overlap.py       Columns of samples that are made while other samples are generated
pacing.py        How far generation may run ahead of training, and which finished groups a step takes
replacing.py     Groups that cannot teach, and those that are begun in their place
settings.py      What a user sets about the clock by which samples end
step_clock.py    A clock that counts engine steps, with which the order of everything follows from the seed
virtual_time.py  How long things take in a run whose clock counts engine steps
"""
