"""Traces of episodes: one span per episode, and below it one per answer of the model and call of a tool.

mlflow.py    Where a server of MLflow takes traces
observer.py  Hears of episodes, and sends them as traces of OpenTelemetry
"""
