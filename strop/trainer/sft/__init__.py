"""Supervised fine-tuning: the same run folder, checkpoints and promises as reinforcement learning, a simpler step.

sft.py        `strop sft`
config.py         its section of the configuration
rows.py           where rows come from, and which of them are imitated (rejection sampling)
dataset.py        the rows as token ids with their masks; stored_conversation.py: one of them
conversations.py  token ids of a conversation, and which of them are trained
token_rows.py         rows that hold the tokens themselves, and what a teacher said of them
trainer.py        SupervisedTrainer: the steps of a run, its records and its validation
sft.py         SupervisedWorker: the model, its loss and its updates
result.py         how a run ended
"""
