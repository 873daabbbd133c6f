"""The gateway: an OpenAI-compatible HTTP server whose every call is recorded token by token.

agent.py           openai_agent: an unmodified agent of a user, in an episode
chat.py            Answers of /v1/chat/completions and /v1/completions
chat_model.py      A model of the gateway
completion.py      One call: its choices sampled, parsed and recorded
errors.py          Errors in OpenAI's form
plugin.py          The user's function and the gateway of this process, for openai_agent
messages.py        Chat messages: of clients, keys for comparison, and for the chat template
prompt_scorer.py   Log-probs of prompts, from a model of this process
request.py         Parsed requests
responses.py       /v1/responses
sampled_answers.py Sampled answers of a session, found again when a client sends them back
scoring.py         Scoring of prompts: `echo` of /v1/completions
server.py          The HTTP server
session.py         One session: its calls as training sequences
settings.py        Settings of openai_agent
streaming.py       Incremental decoding, and stop texts
token_bytes.py     Bytes of single tokens, for their log-probs
token_source.py    Samplers: an engine, or an episode of a run
"""
