"""What every room needs and none owns.

lazy_import.py                names of a package that are imported when they are used
remote_path.py                 names and URLs of what does not lie on this machine
sections.py, field_types.py  sections of the configuration; what a field may hold, and its bounds
registry.py                  what stands under a name
metrics.py                   metrics: their names, and values that merge; tensor_metrics.py: added up on the device
rng.py                random numbers as functions of a key and a position
device.py, machine_limits.py         the device; the cores and the memory that may be used
trust.py                     whether what settings name may be run
user_files.py                Python files of the user's own
safe_read.py             files that somebody else may have written; atomic_io.py: writes that survive a crash
rendezvous.py                   where the processes of a group find each other
activity.py                 what a process does now
background.py                what is done in a thread, once or from time to time

Nothing is imported here: the settings are read without torch.
"""
