"""`strop replay`: a recorded run once more, on the same or other resources; and its samples in another run.

command.py  the command
making.py   the folder of the run that repeats it; repeated.py: what is found there
comparing.py where two runs part, by their fingerprints
schedule.py what ended in which order, and which weights sampled which tokens
samples.py  samples of a run in place of generation (trainer.skip_rollout)
"""
