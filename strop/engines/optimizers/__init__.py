"""Optimizers beside AdamW.

muon.py        Muon: momentum whose update is orthogonalised, for hidden matrices
adamw_8bit.py  AdamW with 8-bit moments, through torchao
"""
