"""Other people's trackers: what they are told of a run, without the run depending on them.

behind.py   a tracker that is told from a thread of its own
story.py    what a run tells: its name, settings, samples of validations, its curve
command.py  `strop track`: a run that is already recorded
wandb.py, mlflow.py, swanlab.py, trackio.py, clearml.py, comet.py: one program each; tensorboard.py: files, which are
            written at once
"""
