"""Weights on their way from the ranks that train them to rollout workers in other processes.

A sync is a transaction: the sender begins a version with the metadata of its weights, every receiver answers that
it fits, buckets follow, and the sender commits with the digest of every tensor. A receiver accounts for every
tensor exactly once and reads its live parameters again before it lets anything be generated; until then it refuses
by name.

accounting.py       Accounting of one sync
broadcast_group.py  Process group of one rank of the sender and all receivers
bucket.py           Tensors for another process on this machine
channel.py          Small JSON messages between the sender and its receivers
collective.py       Buckets by broadcast
comparison.py       Positions of the elements that differ between two arrays
cuda_ipc.py         Memory of a CUDA device that other processes of the node open
delta.py            Changes of weights since the last sync
device_slots.py     Slots in the memory of the sender's device
host_copy.py        Weights in host memory for engines that take whole tensors
incoming.py         One sync on the side of a rollout worker
load_weights.py     Engines with weights of their own, which are given those of a model in this process
model_target.py     The parameters of a model in this process, into which weights are received
outgoing.py         The weights of one sync, as a rank of the actor gives them
own_parts.py        Parts that a rank gives of the weights of a model
piece_layout.py     Places in a bucket
pieces.py           Weights leave their shards over the network or through a store
probe.py            Probe of an engine's weights by what it computes, where they cannot be read back
receiver.py         The side of a rollout worker
sender.py           The side of the actor
sender_ranks.py     The ranks of the actor while they send weights together
shards.py           Weights leave their shards for memory that all ranks of the sender see
shared_memory.py    Slots in shared memory of the node
slots.py            Buckets through two slots of memory that the processes of a node share
store_transport.py  Buckets through a store
stream.py           Buckets of weights, and a model's weights as a stream of them
target.py           Targets of weights
transport.py        Transports
transport_choice.py Choice of the transport of a sync
types.py            Types of a weight sync
verified_engine.py  A rollout engine that generates with verified weights only
"""
