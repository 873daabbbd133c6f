"""Supervised fine-tuning: the same run folder, checkpoints and promises as reinforcement learning, a simpler step.

command.py        `strop sft`
config.py         its section of the configuration
conversations.py  token ids of conversations, and which of them are trained
trainer.py        SupervisedTrainer: the steps of a run, its records and its validation
worker.py         SupervisedWorker: the model, its loss and its updates
result.py         how a run ended
"""
