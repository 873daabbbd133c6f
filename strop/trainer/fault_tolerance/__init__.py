"""Runs that outlive the processes and machines that they have, and what ends them.

background.py  Checkpoints that are written while training goes on (run.async_save)
disk.py        Watch over the time that a checkpoint takes to write
elastic.py     Elastic runs: fewer machines while some are lost, and more again (resources.min_nodes)
healing.py     Recovery from dead worker processes (run.max_restarts)
machine.py     A machine that is about to be taken away: the run is saved before (run.save_before)
node_counts.py  Numbers of machines on which a run can go on (resources.min_nodes)
rollout_workers.py  Rollout workers apart that are lost while a run goes on, and their replacements
signals.py     Signals that ask a run to end
"""
