"""`strop replay`: a recorded run once more, on the same or other resources.

command.py  the command
making.py   the folder of the run that repeats it; the core follows what it finds there (strop.trainer.replay)
"""
