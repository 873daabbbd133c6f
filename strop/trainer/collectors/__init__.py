"""Collection of the samples of a step: one Collector, and the strategies it is made of.

collector.py         the steps: rounds of groups that are played at once, or groups in flight, taken as they complete
make.py              which strategies a configuration asks for
next_prompts.py      the next prompts, entered in the ledger
dynamic_sampling.py  GroupFilter: groups that are dropped because they cannot teach (algorithm.filter_groups)
asynchronous.py      GroupsInFlight: groups in the rollout workers, and what a checkpoint keeps of them; calls.py: the
                     calls of the workers
pacing.py            StalenessBound: how many groups are started, and which ones a step takes (rollout.max_staleness)
lead.py              groups in flight go on in later steps; refill.py: how many are started for those that are dropped
over_issue.py        a step takes the groups that complete first (rollout.over_issue)
replayed.py          the recorded order of a run that is repeated
groups.py            records of groups in flight and of dropped groups
"""
