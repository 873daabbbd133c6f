"""Agent loops in verl's form: classes with `async def run(self, sampling_params, **row)`, or as of mid-2025.

loops.py     the adapter that makes an agent of such a class
base.py      AgentLoopBase
server.py    what loops generate with, and the record of it
inputs.py    what loops are given: settings of the run, and the row
output.py    what they return, and the training sequence that it is
kit.py       the loops of a YAML list, agent.loops
"""
