"""Trackers: the terminal, and those of other people, which a run does not depend on.

group.py    several of them as one; what fails is switched off
progress.py    how far generation is, while a step lasts
console.py  a bar with the time left, and the numbers that people watch
async_logger.py   a tracker that is told from a thread of its own
run_metadata.py    what a run tells: its name, settings, samples of validations, its curve
track.py  `strop track`: a run that is already recorded
wandb.py, mlflow.py, swanlab.py, trackio.py, clearml.py, comet.py: one program each; tensorboard.py: files, which are
            written at once
"""
