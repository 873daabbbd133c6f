"""Trackers: the terminal, files and tracking services, none of which a run depends on.

async_logger.py  Asynchronous logging: a tracker whose library is called from a thread, so that a slow or failing
                 one costs the run nothing
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
