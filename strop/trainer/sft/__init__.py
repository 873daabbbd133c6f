"""Supervised fine-tuning: the same run folder, checkpoints and promises as reinforcement learning, a simpler step.

result.py   How a fine-tuning ended, as its records say
trainer.py  The steps of a fine-tuning, its records and its validation
"""
