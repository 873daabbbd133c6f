"""LoRA: adapters on a loaded model, through PEFT.

adapters.py       put in, trained, switched off, merged, saved
peft_settings.py  PEFT's configuration of a new adapter, and of a saved one
products.py       Forward pass of a layer with an adapter, added in place
"""
