"""Folders of models whose weights are quantised, read as the numbers that they stand for.

scheme.py   the form of the weights, from the quantization_config of a config.json
numbers.py  the numbers of FP8 and MXFP4 weights
model.py    a model of transformers with them
weights.py  the weights of such a folder by their names in an unquantised one, each made when it is read
"""
