"""What runs in vLLM's own environment: plain files, started by path, that import nothing of strop but its digest.

server.py         the process that owns vLLM's engine and obeys the process of strop that started it
strop_worker.py   what each of vLLM's workers imports: the transfer of weights, and log-probs as a trainer needs them
"""
