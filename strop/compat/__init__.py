"""What comes from verl, TRL or OpenRLHF finds its way here.

migrate/  Settings of other libraries into ours, every one of them accounted for
"""
