"""The gateway: an OpenAI-compatible HTTP server whose every call is recorded token by token.

agent.py          Inside a run
chat.py           /v1/chat/completions and /v1/completions
completion.py     One call
errors.py         What a client is told when a call cannot be served, in OpenAI's form
kit.py            What openai_agent has in an episode
messages.py       Chat messages as clients send them, as they are compared, and as the chat template takes them
prompt_scorer.py  Log-probs of prompts, from a model of this process
request.py        Requests as they are read
responses.py      /v1/responses
scoring.py        Prompts that are scored and not continued
server.py         The HTTP server
session.py        The calls of one session as training sequences, token by token as they were sampled
settings.py       Settings of agents that know nothing of strop
streaming.py      Text of tokens as they come, and where it ends
token_source.py   Where the tokens of a call come from
"""
