"""Generation with SGLang, which runs in an environment and in processes of its own.

It has never met the real engine: there is no build of SGLang for a CPU. It was written against the schemas and routes
of sglang 0.5.23, and is tested with a server that speaks them on loopback. What must be looked at first on a GPU: that
log-probs under top_p and top_k are those of the whole distribution, that a request held by a pause goes on after new
weights with `weight_versions` for each span of its tokens, and how much memory a release gives back.

config.py    SglangConfig; environment.py: where SGLang is installed
process.py   SglangProcess: its server on loopback, with a token, that ends with its owner
engine.py    SglangEngine: the contract of a rollout engine, kept over HTTP
target.py    SglangTarget: weights into it through shared memory
launch.py    makes the engine of a rollout worker
inside/      what runs over there
"""
