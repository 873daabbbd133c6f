"""A native engine in a process of its own, in the place of vLLM and SGLang: `EngineServer` there, `RemoteEngine` here.

address.py  address of a served engine, and the messages to it (frames: strop.rollout.routing.wire)
server.py  EngineServer: serves any engine to whoever knows its secret
engine.py  RemoteEngine: the same engine, as its callers see it
"""
