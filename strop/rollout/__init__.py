"""Rollout: token ids in, token ids with log-probs and policy versions out.

config.py        RolloutConfig; registry.py: names of engines
tracing_config.py  configuration of the backend that receives traces of episodes
types.py         Sampling, TokenOutput, RolloutEngine: the contract every engine keeps
client.py        GenerateClient: the contract that agents call; EngineClient: an engine in this process, with deadlines
requests.py      checks of a request that all engines make
engine_group.py  EngineContext, Generation, and EngineGroup: the native engine of a rollout worker
engine_setup.py  makes the engines of a rollout worker, by rollout.engine and rollout.replicas
native/          the in-process engine over any Hugging Face causal language model
vllm/, sglang/   engines in environments of their own
replicas/        several such engines with one router: lost ones are replaced, and their requests go on
routing/         one router over the engines of all rollout workers of a run
weight_sync/     weights of the policy in engines with weights of their own, and in other processes
openai/          a server with OpenAI's API
"""
