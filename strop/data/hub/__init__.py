"""What lies elsewhere: models of hubs, and what URLs name, read from a folder here or sent there.

face.py        Models of the Hugging Face hub, through its own client
face_sets.py   Data sets of the Hugging Face hub at one commit
files.py       Which files of a model are fetched
folders.py     Which files of a folder are the rows that are meant
models.py      From the name of a model to a folder of this machine
places.py      What the name of a model stands for
remote.py      What a hub or a store is asked for, whichever it is
rows.py        Where rows come from when not from a local file
scope.py       Models and data sets of ModelScope, through its own client (strop[modelscope])
scope_sets.py  Data sets of ModelScope at one state
sending.py     A folder of this machine to a hub or a store
stores.py      What a URL names, through fsspec
transfer.py    Files between a folder of this machine and what a URL names, through fsspec
waiting.py     Waits that last as long as something arrives, and what a fetch needs of this machine
"""
