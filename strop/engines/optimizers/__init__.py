"""Optimizers of some of the parameters.

adamw.py       AdamW, and Part, which the others are built on
muon.py        Muon: momentum whose update is orthogonalised, for hidden matrices
adamw_8bit.py  AdamW with 8-bit moments, through torchao
"""
