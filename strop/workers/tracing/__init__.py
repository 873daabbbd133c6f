"""Traces of episodes: one span per episode, and below it one per answer of the model and call of a tool.

mlflow.py    MLflow's endpoint for traces
observer.py  Episode observer that sends traces of OpenTelemetry
"""
