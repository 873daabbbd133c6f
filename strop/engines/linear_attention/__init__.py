"""Layers with a recurrent state (linear attention, SSM) on packed tokens.

packed.py  Layers that carry a state from token to token (linear attention), on packed rows and in the native engine
states.py  A model with layers that carry a state, and the states of the running sequences of the native engine
"""
