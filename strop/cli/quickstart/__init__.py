"""`strop quickstart`: a policy that learns, end to end, on this machine.

quickstart.py  the command
stages.py   model, fine-tuning, training and validation, one after the other
task.py     the task: words to turn around
"""
