"""Layers with experts.

counts.py    choices of experts over rows of all ranks
layers.py    the layers of a model that route each token to a few experts
precision.py experts in the precision of computation
routing.py   the routing of a micro-batch: loads, losses, and experts that are given
losses.py    z-loss and balance loss of routers
"""
