"""What comes from verl, TRL or OpenRLHF finds its way here.

key_aliases.py  Keys of verl, TRL and OpenRLHF, for those who type them from habit
migrate/        Settings of other libraries into ours, every one of them accounted for
"""
