"""What makes the native engine and training fast on a CPU. Without it torch computes the same, but for rounding.

kernel.py    decode attention, decode steps and next tokens in C (decode.c, sample.c), compiled once for a machine
steps.py     decode steps of models of Llama's form: who takes them, and the packed weights they read
cpu_products.py  products of layers in float32 by oneDNN, on processors where torch's first choice is slow at them
"""
