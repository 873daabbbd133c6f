"""Run folders that somebody else may have made: nothing that their settings name is run without --trust-code.

named.py     Code, programs and addresses that settings would run, import, start or contact
own.py       Settings of a user's own
settings.py  The settings of a run folder that somebody else may have made
"""
