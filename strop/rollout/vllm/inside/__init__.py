"""Files that run in vLLM's own environment: started by path, they import nothing of strop but its digest.

server.py         the process that owns vLLM's engine and obeys the process of strop that started it
headless.py       the part of an engine on each further node that it spans
strop_pictures.py what vLLM's processes know of images and videos: sizes, and how patches enter it
strop_parent.py   a process that ends with the one that started it
strop_routing.py  vLLM's record of the experts that tokens are routed to, where it is asked for
strop_worker.py   what each of vLLM's workers imports: the transfer of weights, and log-probs as a trainer needs them
"""
