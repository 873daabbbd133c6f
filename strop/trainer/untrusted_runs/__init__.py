"""Run folders that somebody else may have made: nothing that their settings name is run without --trust-code.

named.py     What settings would run, import, start or contact
own.py       Which settings are a user's own
settings.py  The settings of a run folder that somebody else may have made
"""
