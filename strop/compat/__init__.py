"""What comes from verl, TRL or OpenRLHF finds its way here.

data/            dataset classes and samplers in verl's form, and well-known data sets in its schema
data_prepare.py   `strop data prepare`, which writes these
migrate/           their settings into ours, every one of them accounted for
verl_aggregation.py       the one number of losses that reduce by themselves
verl_convention.py    estimators and losses in verl's calling convention, called as they expect
listed_functions.py    reward functions of TRL, and for batches, in the worker processes of the reward; there too
                     query_functions.py: those of OpenRLHF, and verl_managers.py: managers of verl
verl_loops/         verl's agent loops, played by an adapter
dispatch_modes.py    dispatch modes that users add, by name or as dictionaries
batch_operations.py           operations on batches that nothing in strop needs
folding.py           batches along a second axis, and padded so that their rows divide
hydra_files.py      files beside a configuration, as in Hydra
interpolation.py     `${...}` in settings, as in Hydra's files
verl_groups.py     RayWorkerGroup, also a detached one, and what it is made of, under verl's names
"""
