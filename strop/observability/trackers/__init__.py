"""Trackers: the terminal, and those of other people, which a run does not depend on.

async_logger.py  A tracker that is told from a thread of its own, so that one that fails or waits costs the run
                 nothing
clearml.py       ClearML
comet.py         Comet
console.py       Progress on the terminal
group.py         Several trackers as one, by the names that a configuration uses
mlflow.py        MLflow, at MLFLOW_TRACKING_URI
run_metadata.py  Metadata of a run for trackers, beside its metrics
setup.py         TrackerSetup, Tracker, their registry, and the metrics file
swanlab.py       SwanLab
tensorboard.py   Metrics as event files for TensorBoard, written in this thread
trackio.py       Trackio
wandb.py         Weights & Biases
"""
