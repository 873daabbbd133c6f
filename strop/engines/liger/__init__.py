"""Fused kernels of liger-kernel for norms, gated activations and rotary embeddings.

kernels.py  put into a loaded model
"""
