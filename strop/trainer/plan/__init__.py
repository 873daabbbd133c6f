"""Memory and time of a run before it starts, from the configuration of its models alone.

accelerator.py      Kernels of an accelerator as a trace sees them
baseline.py         Memory of a process before it has a model
batches.py          Lengths of answers, micro-batches, and the largest one
changes.py          Copies of a configuration with other values
cpu_layers.py       Compiled layers of a CPU as a trace sees them
devices.py          Memory and speed of devices: published, or of this CPU as measured
memory.py           Memory of a rank in each phase of a step
parameters.py       Parameters of a model by their place, and the share of a rank
passes.py           Memory and work of the passes of a model over a micro-batch
placement.py        Search for a placement by the cost model
plan.py             A run's plan, put together
roles.py            Roles of a run as the plan sees them
smallest_change.py  The smallest change of a configuration with which its memory fits
step_time.py        Seconds of the stages of a step
tracing.py          Trace of a pass without numbers
"""
