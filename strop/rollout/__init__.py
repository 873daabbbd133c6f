"""Rollout: token ids in, token ids with log-probs and policy versions out.

config.py        RolloutConfig; registry.py: names of engines
types.py         Sampling, TokenOutput, RolloutEngine: the contract every engine keeps
client.py        GenerateClient: what agents talk to; EngineClient: an engine in this process, with deadlines
requests.py      what engines ask of a request
engine_group.py  what generates in a rollout worker: Place, Generation, and the native engine as Serving
serving.py       the engines of a rollout worker, by rollout.engine and rollout.replicas
native/          the in-process engine over any Hugging Face causal language model
vllm/, sglang/   engines in environments of their own
replicas/        what such engines share, and what asks them
weight_sync/     weights of the policy in engines with weights of their own, and in other processes
openai/          a server with OpenAI's API
"""
