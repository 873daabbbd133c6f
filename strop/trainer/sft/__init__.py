"""Supervised fine-tuning: the same run folder, checkpoints and promises as reinforcement learning, a simpler step.

result.py   Result of a fine-tuning run, from its records
trainer.py  The steps of a fine-tuning, its records and its validation
"""
