"""Training rows that come while a run goes on: from a generator (data.datagen), or from a dataset class that hears of
batches.

growth.py    when they come, and that a resume has them again
prompts.py   the prompts of files, and of the rows after them
"""
