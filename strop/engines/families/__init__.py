"""Model families that are known not to run, refused before a large model is loaded.

refused.py  which, and what they do
"""
