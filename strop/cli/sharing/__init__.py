"""A trained model for others: to a hub or a store, with a card that says how it was made.

card.py  The card of a model
"""
