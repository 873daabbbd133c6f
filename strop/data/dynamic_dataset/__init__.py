"""Training rows that come while a run goes on: from a generator (data.datagen), or from a dataset class that hears of
batches.

growth.py   Rows that come while a run goes on, restored on resume
prompts.py  Training prompts to which rows are added while a run goes on
"""
