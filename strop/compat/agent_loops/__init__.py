"""Agent loops in verl's form: classes with `async def run(self, sampling_params, **row)`.

loops.py     AgentLoopBase, and the adapter that makes an agent of such a class
inputs.py    what loops are given: settings of the run, and the row
output.py    what they return, and the training sequence that it is
kit.py       the loops of a YAML list, agent.loops (settings.py)
"""
