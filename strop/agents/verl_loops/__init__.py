"""Agent loops in verl's form: classes with `async def run(self, sampling_params, **row)`, or as of mid-2025.

loops.py     the adapter that makes an agent of such a class
base.py      AgentLoopBase
server.py    ServerManager, which generates and records the calls
inputs.py    arguments of loops: settings of the run, and the row
output.py    AgentLoopOutput, and its conversion to a training sequence
tools.py     tools in the form of mid-2025
plugin.py    the loops of a YAML list, agent.loops
"""
