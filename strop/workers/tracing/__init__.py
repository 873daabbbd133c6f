"""Observers of episodes: traces for OpenTelemetry and MLflow, and the timeline of a profiled step.

mlflow.py    MLflow's endpoint for traces
observer.py  Episode observer that sends traces of OpenTelemetry
timeline.py  Episode observer that adds samples to the timeline
"""
