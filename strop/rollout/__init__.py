"""Rollout: token ids in, token ids with log-probs and policy versions out.

config.py     RolloutConfig; registry.py: names of engines
types.py      Sampling, TokenOutput, RolloutEngine: the contract every engine keeps
client.py     RolloutClient: what agents talk to; its deadlines and probes
ledger.py     the tokens so far of a request, and what became of all requests
replicas.py   which of several engines serve, and who gets the next request
native/       the in-process engine over any Hugging Face causal language model
requests.py, bucket.py   what engines ask of a request; how weights reach other processes
sync/         how an engine with weights of its own holds those of the policy

Guests in this room, each with a file that says where it joins: vllm/ and sglang/ (engines in environments of their
own), transfer/ (weights to rollout workers in other processes), endpoint/ (a server with OpenAI's API), conformance/
(the checks that every engine must pass).
"""
