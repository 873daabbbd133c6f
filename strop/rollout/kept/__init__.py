"""Computed tokens that may begin a later request of the native engine: prompts, and turns that ended.

prefixes.py  PrefixStore: those used last, found by the tokens that they share with a sequence
turns.py     KeptTurns: what is worth its memory, as the engine asks for it
"""
