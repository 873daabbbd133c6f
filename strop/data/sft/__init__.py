"""Rows of supervised fine-tuning: conversations as token ids with a loss mask.

answer_ends.py          Last tokens of trained answers, which generation should stop at, here and in other programs
config.py               Settings of supervised fine-tuning
conversations.py        Token ids of a conversation, and the loss on assistant turns only
dataset.py              The rows of a fine-tuning as token ids with masks
rows.py                 Rows of a fine-tuning from files and run folders, and rejection sampling
stored_conversation.py  One tokenised conversation
token_rows.py           Rows that hold the tokens themselves
"""
