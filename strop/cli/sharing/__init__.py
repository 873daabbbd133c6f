"""A trained model for others: to a hub or a store, with a card that says how it was made.

push.py      `strop push`; export.py: `strop export`
role_export.py  a role of a checkpoint as a Hugging Face folder, proved by its log-probs
card.py         the card: data, algorithm, pass rates with intervals, settings, as the records of the run have them
"""
