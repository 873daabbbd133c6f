"""Somebody else's model behind an address with OpenAI's API: it answers, but has no weights here and is not trained.

config     the section rollout.openai
speech     conversations as bytes that become chat messages again, for servers whose tokens are not known
client     what agents talk to in place of an engine
answering  how `strop eval` and others play prompts with it
"""
