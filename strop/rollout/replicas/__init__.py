"""Engines that are not the native one: in processes of their own, or a user's, so that they may be lost.

client.py       RolloutClient: asks one or several, and takes requests of one that is lost elsewhere
partial_request.py the tokens so far of a request that is answered in parts
router.py     which of several engines serve, and who gets the next request
engine_replicas.py        Fleet: the engines of a rollout worker, each started again where it is lost
load_weights.py      how an engine is made, and given the weights of a model in this process
probe.py      whether an engine computes with weights that cannot be read back
subprocess_engine.py  what an engine in another process is made for
prompt_checks.py      what it asks of a request; bucket.py: tensors for another process on this machine
remote_weight_sync.py      they are brought to the policy's weights
checks.py     settings that do not go together
joining.py      how the core asks all this
"""
