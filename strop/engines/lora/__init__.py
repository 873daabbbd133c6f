"""LoRA: adapters on a loaded model, through PEFT.

adapters.py  put in, trained, switched off, merged, saved
products.py  Forward pass of a layer with an adapter, added in place
"""
