"""What a person wants checked before a run: functions of their own, environments, files of data.


    command.py               `strop check`: whether a run can learn; a loss or an estimator under test
    preflight/               the samples of a run that tell; before its first step too
    functions/               a short live check of a policy loss or an advantage estimator
    environments.py          an environment and scripted players: `strop env check`
    environments_of_run.py   the same of the environments that a run will play, before its first step
    rewards.py               a reward without a model: `strop reward check`; reward_probes.py: answers to try
    rewards_of_run.py        its saved certificate, in the log of a run that trains with it
    data_command.py          `strop data check`; data_files.py: rows, lengths, repeats

Nothing is imported here: a command imports what it needs.
"""
