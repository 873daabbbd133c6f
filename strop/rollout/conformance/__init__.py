"""Whether an engine keeps the contract of strop.rollout.types: one list of checks for every engine.

The judge is plain transformers over the same model folder: no packing, no cache of ours, one sequence at a time.

judge.py       Judge: what the model itself computes
trial.py       Subject, Trial, Check; Conformance runs checks on one engine, `run_checks` all of them
generation.py  checks of what is generated: tokens, log-probs, distribution, limits
requests.py    checks of how requests live: abort, cancellation, pause, refusal, liveness
weights.py     checks of weights and memory: update, adapter, sleep, cached prompts
suite.py       CHECKS, and run_checks
engines.py     `strop doctor --engines`: all of them on the engines of this installation
"""
