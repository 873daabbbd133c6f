"""What speaks with other processes and with services, and what waits for them.

Sockets that a run listens on: where they are bound, and who may speak there; and one way to ask a service over HTTP.

gate             a listening socket that lets in only who proves to know the secret of the run
messages         JSON objects over a connection
rendezvous       where the processes of a torch.distributed group find each other, behind a gate
heartbeat        what a process does, written down for `strop incident`
interfaces       network interfaces by address, and the libraries that listen on one
exchange         one POST with a deadline
calls            requests to a service: its key, limits and repeats
token_bucket     calls per second
background_loop  event loops in threads of their own
call_loop        the loop of a worker whose work outlives the call that began it
"""
