"""Scores that come over HTTP.

config.py  JudgeConfig, ServerConfig, and what both share
rubrics.py the prompts of judges, and criteria
replies.py what a judge said, as numbers
comparing.py  answers to one prompt compared: orders, and what comes of them
client.py  RemoteClient: the thread that asks, repeats and counts
cost_budget.py  what asking a judge may cost
services.py  all of them, asked together with the functions of the reward
judge.py   a language model that grades; server.py a reward model on a server
"""
