"""Steps that choose what they play: which groups can teach, and long prompts first.

causes.py      which groups can teach (algorithm.filter_groups); settings.py: what a user sets; check.py: settings
               that do not go with it
lengths.py     which prompts a step begins with (rollout.longest_first)
"""
