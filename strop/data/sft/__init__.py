"""Rows of supervised fine-tuning: conversations as token ids with a loss mask.

answer_ends.py          How trained answers end
config.py               What a fine-tuning reads and how it is trained
conversations.py        Token ids of a conversation, and the loss on assistant turns only
dataset.py              The rows of a fine-tuning as token ids with masks
rows.py                 Where rows of a fine-tuning come from, and which of them are imitated
stored_conversation.py  One conversation as it is trained, and in little memory
token_rows.py           Rows that hold the tokens themselves
"""
