"""Generation with vLLM, which runs in an environment and in processes of its own.

config.py        VllmConfig
environment.py   where vLLM is installed, and how it gets there
process.py       ServerProcess: the process that owns vLLM's engine, and the messages to it
follower.py      VllmFollower: the worker on a further node of an engine that spans several
node_part.py     NodePart: vLLM's part there, seen from the first node
settings.py      Settings: arguments and variables of one engine
engine.py        VllmEngine: the contract of a rollout engine, kept by that process
pictures.py      SharedPictures: images and videos of prompts, as the trainer's model gets them
routed.py        experts of a request, out of vLLM's message
target.py        VllmTarget: weights into it through shared memory, on each of its nodes
launch.py        makes the engine of a rollout worker; engine.py: `strop engine`
inside/          what runs over there
"""
