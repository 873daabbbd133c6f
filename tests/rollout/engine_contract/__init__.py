"""Contract tests of rollout engines: the rules of `strop.rollout.types`, tried on a small model.

The reference is plain transformers over the same model folder: no packing, no cache of ours, one sequence at a time.
For an engine of your own, copy this folder, write a test like tests/rollout/test_server_contract.py, and give
`EngineCase` a function that starts your engine.

reference_model.py  ReferenceModel: log-probs and greedy tokens by transformers
case.py             StartedEngine, EngineCase: requests, comparisons, `check` of one rule
generation.py       tokens, log-probs, distribution, limits
requests.py         streaming, abort, cancellation, pause, refusal, liveness; damage and close
weights.py          update, adapter, sleep, cached prompts
rules.py            RULES
native.py           starts the in-process engine
server.py           starts engines in processes of their own
"""
