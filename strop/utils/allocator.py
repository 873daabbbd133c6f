"""torch's allocator of CUDA memory, in segments that grow.

Micro-batches of unequal lengths and a table of keys that grows leave gaps between segments of fixed sizes, which no
tensor fits into. Segments that grow have few. torch reads the variable when it first allocates, so it is set where a
process begins, unless the user has set one.

vLLM and SGLang put their weights to sleep in pools of memory, with which such segments do not go
(github.com/pytorch/pytorch/issues/147851): their processes are told to do without. Memory that other
processes open is allocated without them too (rollout/weight_sync/cuda_ipc.py).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""The name that every version of torch reads, and that vLLM looks at."""
_NAMES = (VARIABLE, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_GROWING, _FIXED = "expandable_segments:True", "expandable_segments:False"


def allocator_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The setting of a process with these variables: the user's where there is one, else segments that grow."""
    own = {name: environment[name] for name in _NAMES if name in environment}
    give_way(own)
    return own or {VARIABLE: _GROWING}


def give_way(environment: MutableMapping[str, str]) -> None:
    """Take our setting out of these variables where the user has set the allocator under another name: torch would
    prefer ours."""
    is_set = any(name in environment for name in _NAMES if name != VARIABLE)
    if is_set and environment.get(VARIABLE) == _GROWING:
        del environment[VARIABLE]


def fixed_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that take `allocator_variables` back for an engine in a process of its own; none where the user has
    set something else."""
    return {VARIABLE: _FIXED} if environment.get(VARIABLE) == _GROWING else {}
