"""Rollout: token ids in, token ids with log-probs and policy versions out.

config.py   RolloutConfig
types.py    Sampling, TokenOutput, RolloutEngine: the contract every engine keeps
client.py   RolloutClient: what agents talk to
native/     the in-process engine over any Hugging Face causal language model
vllm/       vLLM in processes of its own
sync/       weights from the actor's ranks to rollout workers with a copy of their own
"""
