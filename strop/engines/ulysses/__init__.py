"""Sequence parallelism: one packed row over several ranks.

shards.py  a rank's part of a row, and what ranks exchange around attention
"""
