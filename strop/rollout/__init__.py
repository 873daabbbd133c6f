"""Rollout: token ids in, token ids with log-probs and policy versions out.

config.py     RolloutConfig; registry.py: names of engines
types.py      Sampling, TokenOutput, RolloutEngine: the contract every engine keeps
client.py     GenerateClient: what agents talk to; EngineClient: an engine in this process, with deadlines
native/       the in-process engine over any Hugging Face causal language model
requests.py   what engines ask of a request
weight_sync/         how an engine with weights of its own holds those of the policy

Below it: vllm/ and sglang/ (engines in environments of their own), replicas/ (what such engines share, and what asks
them), weight_sync/ (weights to rollout workers in other processes), native/ and native/ (what makes the native engine
faster), openai/ (a server with OpenAI's API).
"""
