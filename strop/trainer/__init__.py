"""The training loop, and everything around it that a run needs from its first line to its last.

The algorithm of a step
loop.py             Trainer: collect, learn, update weights; records, validation and checkpoints around it
collecting.py       the samples of a step (rounds/: in several rounds, with a group filter)
rollout_batch.py       the rows that are trained on, as references, cut into optimizer batches
producers.py        who makes each column of protocol/schema.py, in the order of a step
learning.py         from scored samples to new weights
timing.py           stages from outside: their time, and which role is active
step_logging.py          what a step tells people: its numbers, and what was lost
records.py          a step: samples, what was learned, and what it leaves in the run folder, fates and a fingerprint

Its configuration
config.py           Config, the root; sections.py: what does not go together; sections.py: sections of the loop
loading.py          a configuration with the user's own files, checked; what it would run or contact

Before the first step
start.py           a run is begun or continued; resume.py: from where, with which settings anew
models.py           models in folders of this machine (strop.data.hub: those that are fetched)
setup.py            data, sampling and what is checked with them; the reward function tried
worker_groups.py            the roles of a configuration: which there are, in which processes
policy_sync.py      generation at the policy's weights

Numbers
validation.py       answers on held-out prompts
setup.py         where numbers go: the metrics file (strop.observability.trackers: all else)

checkpointing.py    what a checkpoint holds, for every kind of training
early_stopping.py           what ends a run, and how it ended
callbacks.py          who asks a run to end, and who hears of it; fault_tolerance/: signals, and processes, machines
                    and disks that are lost
"""
