"""Hubs and stores: models and data sets fetched and sent through huggingface_hub, modelscope_hub and fsspec.

huggingface.py   Models and data sets of the Hugging Face hub
modelscope.py    Models and data sets of ModelScope (strop[modelscope])
model_files.py   Files of a model that are fetched
models.py        From the name of a model to a folder of this machine
places.py        Meaning of the name of a model
repo.py          Interface of a repository, and waits with a deadline
sending.py       A folder of this machine to a hub or a store
store_errors.py  Errors of the clients of stores as sentences
stores.py        Files at what a URL names
"""
