"""Collection of the samples of a step: one Collector, and the strategies it is made of.

asynchronous.py      Groups that rollout workers play over several steps
calls.py             Calls of rollout workers that play groups over several steps
collector.py         The samples of a step
dynamic_sampling.py  Dynamic sampling (DAPO)
greedy_baselines.py  Greedy baselines, which some estimators take (ReMax)
filter_rules.py      Rules of dynamic sampling
groups.py            Groups of steps to come, and those of them that a step drops
lead.py              Groups in flight go on in later steps
lengths.py           Lengths of answers at earlier visits of a prompt, and the order of prompts by them
make.py              The collector of a run
next_prompts.py      The next prompts of a run, entered in its ledger
over_issue.py        Steps that start more prompts than they train, and do not wait for the slowest
pacing.py            Staleness bound of generation ahead of training, and selection of finished groups
refill.py            Groups that cannot teach, and those that are begun in their place
replayed.py          The recorded order in which a run that is repeated took its groups (strop replay)
saved_state.py       Small state of a collector in a checkpoint, a JSON file
"""
