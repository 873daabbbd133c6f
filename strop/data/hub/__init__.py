"""What lies elsewhere: models of hubs, and what URLs name, read from a folder here or sent there.

places      what a model's name stands for: a folder, a model of a hub, a URL
files       which files of a model are fetched, and which of them a folder lacks
locating    the models that a configuration names, in folders of this machine
models      the one function that makes a folder of a name
rows        data sets of hubs, and files with rows that URLs name; face_sets, scope_sets: those of each hub
folders     which files of a folder of a data set are the rows that are meant
inputs      models and data sets of a run, when it begins and when it goes on
commits     the commits of data sets that a run reads, looked up when it starts
face        models of the Hugging Face hub, through its own client and cache
scope       models of ModelScope, through its own client and cache
stores      what a URL names, through fsspec
sending     the one function that sends a folder of this machine to a hub or a store
copies      copies of a run at a URL while it trains, and from there
transfer    files between a folder of this machine and a URL, through fsspec
waiting     waits that end when nothing arrives
"""
