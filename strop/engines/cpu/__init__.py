"""Layers of an update in C, for a CPU. Where gcc is missing, torch computes the same, but for rounding.

attention.py     Attention of packed segments
feed_forward.py  A gated feed-forward part, with its products
layers.py        Norms, rotary positions and the gate of a feed-forward part
library.py       The compiled functions
"""
