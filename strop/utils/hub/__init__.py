"""Hubs and stores: models and data sets fetched and sent through huggingface_hub, modelscope_hub and fsspec.

byte_store.py    Bytes under names below a URL
huggingface.py   Models and data sets of the Hugging Face hub, through huggingface_hub
model_files.py   Files of a model that are fetched
models.py        Fetching of models
modelscope.py    Models and data sets of ModelScope, through modelscope_hub (strop[modelscope])
addresses.py     Address of a model: the hub, store or folder that its name means
repo.py          Repository of a hub, or folder of a store
sending.py       Sending of a folder of this machine to a hub or a store
store_errors.py  Errors of the clients of stores as sentences that say what to do
stores.py        Files below a URL, through fsspec
"""
