"""Sharing a trained model on a hub or in a store.

card.py  Model card
"""
