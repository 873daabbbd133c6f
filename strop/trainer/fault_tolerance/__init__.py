"""Runs that outlive the processes and machines that they have, and what ends them.

healing.py   worker processes that die: all of them are made again (run.max_restarts)
limits.py    hours, pass rate, patience (settings.py: what a user sets)
background.py  checkpoints that are written beside the training (run.async_save)
disk.py      a checkpoint that takes long to write is said, and one that takes too long ends the process
signals.py   signals let the step that runs come to its end, and the run is saved there
machine.py   a machine that is about to be taken away: the run is saved before (run.save_before)
"""
