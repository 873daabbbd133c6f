"""Layers with experts.

layers.py   The layers of a model that route each token to a few experts
"""
