"""How much there is to compute, and how much a device can.

counts.py  what the core asks
work.py    floating-point operations of passes over packed rows
peak.py    operations per second of a device at best
"""
