"""Weights on their way from the ranks that train them to rollout workers in other processes.

A sync is a transaction: the sender begins a version with the metadata of its weights, every receiver answers that
it fits, buckets follow, and the sender commits with the digest of every tensor. A receiver accounts for every
tensor exactly once and reads its live parameters again before it lets anything be generated; until then it refuses
by name.

channel.py        SenderChannel, ReceiverChannel: small JSON messages over TCP, every wait with a deadline
accounting.py     TransferState: what has arrived, what is missing, what is wrong
transport.py      Plan and the protocol of the two transports
collective.py     a broadcast per bucket over a process group of its own
shared_memory.py  buckets through two slots in shared memory, for processes of one node
stream.py         Bucket, parameter_stream: the weights of a model, gathered from their shards, bucket by bucket
sender.py         WeightSender: the side of the actor
receiver.py       WeightReceiver: the side of a rollout worker
verified_engine.py         VerifiedEngine: a rollout engine that generates with verified weights only
both_sides.py        both sides, as the core asks for them
"""
