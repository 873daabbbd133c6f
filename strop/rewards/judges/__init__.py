"""Scores that come over HTTP.

client.py       The client of a scoring service
comparing.py    Answers to one prompt compared with each other
config.py       Settings of scoring services over HTTP
cost_budget.py  Cost budget of a judge
judge.py        A language model that grades answers, or compares them
replies.py      Verdicts in the replies of a judge, as numbers; a sentence about the reply where there are none
rubrics.py      Criteria and prompt templates of a judge
server.py       A reward model behind an HTTP address
services.py     All services of a reward pool
"""
