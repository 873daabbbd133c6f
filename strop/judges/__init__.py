"""Scores that come over HTTP.

config.py  JudgeConfig, ServerConfig, and what both share
cache.py   answers on disk, by request
client.py  RemoteClient: the thread that asks, repeats and counts
cost_budget.py  what asking a judge may cost
judge.py   a language model that grades; server.py a reward model on a server
"""
