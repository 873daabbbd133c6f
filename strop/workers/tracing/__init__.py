"""Traces of episodes: one span per episode, and below it one per answer of the model and call of a tool.

tracing_config.py     the settings, rollout.trace
observer.py   hears of episodes and makes spans of them, with OpenTelemetry
mlflow.py     where a server of MLflow takes them
"""
