"""LoRA: adapters on a loaded model, through PEFT.

adapters.py  put in, trained, switched off, merged, saved
"""
