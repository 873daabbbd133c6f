"""Sequence parallelism: one packed row over several ranks.

settings.py  numbers of ranks that groups of them do not divide
shards.py    a rank's part of a row, and what ranks exchange around attention
"""
