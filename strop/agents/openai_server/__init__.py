"""The gateway: an OpenAI-compatible HTTP server whose every call is recorded token by token.

errors.py      what a client is told when a call cannot be served
messages.py    chat messages as clients send them, and as the chat template takes them
request.py      requests read and checked: what is asked, and with which options
token_source.py    where tokens come from: an engine, or an episode of a run
scoring.py     prompts scored and not continued (`echo`), for evaluation harnesses; prompt_scorer.py: the model's part
completion.py   one call: choices sampled, stop strings seen, parts read
streaming.py     text of tokens as they come
session.py     calls of a session become training sequences; answers that come back keep their tokens
chat.py        /v1/chat/completions and /v1/completions in OpenAI's form; responses.py: /v1/responses
server.py      addresses, token, limits
serve.py     `strop serve`
agent.py       inside a run: agents that know nothing of strop; settings.py, kit.py: what the run names
"""
