"""Somebody else's model behind an address with OpenAI's API: it answers, but has no weights here and is not trained.

byte_tokenizer.py  Conversations as bytes that become chat messages again
client.py          What agents talk to where somebody else's model answers
config.py          Settings of a remote server with OpenAI's API
"""
