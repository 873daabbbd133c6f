"""Training on preferences: which of two answers is better, or whether an answer is good.

trainer.py  The steps of a training on preferences; all else is that of a fine-tuning
"""
