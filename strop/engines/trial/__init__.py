"""A loaded model, tried before anything is computed with it.

packed.py  packed tokens, compared with the model's own forward pass
"""
