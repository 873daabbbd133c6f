"""Whether an engine keeps the contract of strop.rollout.types: one list of checks for every engine.

generation.py  Checks of what is generated
judge.py       What a model computes when plain transformers runs it, one sequence at a time
requests.py    Checks of how requests live
suite.py       All checks, in the order in which they are run, and one call that runs them
trial.py       An engine on trial
weights.py     Checks of weights and memory

The judge is plain transformers over the same model folder: no packing, no cache of ours, one sequence at a time.
"""
