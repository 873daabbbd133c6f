"""What a user changes about a model without writing into its folder.

changes.py  settings, chat template, modules of their own
exact.py    norms in float64
loss_scale.py  float16: the factor of the loss
"""
