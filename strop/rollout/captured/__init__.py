"""Decode steps of the native engine that a GPU captures once and repeats: steps.py."""
