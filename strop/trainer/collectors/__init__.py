"""Collection of the samples of a step: one Collector, and the strategies it is made of.

asynchronous.py      Groups that rollout workers play over several steps
calls.py             Calls of rollout workers that play groups over several steps
collector.py         The samples of a step
dynamic_sampling.py  Dynamic sampling (DAPO)
greedy_baselines.py  Greedy baselines, which some estimators take (ReMax)
group_filter.py      Dynamic sampling
groups.py            Groups of steps to come, and those of them that a step drops
lead.py              Groups in flight go on in later steps
lengths.py           How long the answers to a prompt were at its earlier visits, and which prompts to begin with
make.py              The collector of a run
next_prompts.py      The next prompts of a run, entered in its ledger
over_issue.py        Steps that start more prompts than they train, and do not wait for the slowest
pacing.py            How far generation may run ahead of training, and which finished groups a step takes
refill.py            Groups that cannot teach, and those that are begun in their place
replayed.py          The recorded order in which a run that is repeated took its groups (strop replay)
"""
