"""Run folders that somebody else may have made: nothing that their settings name is run without --trust-code.

settings.py  the settings of a run folder, and what a run that is continued reads
own.py       which settings strop wrote for this user on this machine
named.py     what settings would run, import, start or contact
untrusted_model.py    model folders that somebody else may have made: what is no file, too large or absurd in them
"""
