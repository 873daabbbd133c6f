"""Compiled kernels of the native engine on a CPU. Without them torch computes the same, but for rounding.

kernel.py  Decode steps in C, for a CPU
steps.py   A decode step of the common architecture in one call of compiled C, for a CPU
"""
