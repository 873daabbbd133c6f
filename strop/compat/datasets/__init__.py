"""Rows and orders in verl's form: dataset classes, and samplers that are classes.

custom.py     rows of a class of the user's own (data.dataset_class)
prepare.py    well-known data sets in verl's schema; imported by its command; sets.py: sets to evaluate on, by name
settings.py   data.dataset_class and data.datagen
rlhf.py       RLHFDataset and collate_fn, to be subclassed
samplers.py   AbstractSampler and AbstractCurriculumSampler, and what a run does with an object of such a class
"""
