"""Steps that choose what they play: rounds until enough groups can teach, and long prompts first.

collector.py   dynamic sampling (algorithm.filter_groups); causes.py: which groups can
               teach; settings.py: what a user sets; check.py: settings that do not go with it
lengths.py     which prompts a step begins with (rollout.longest_first)
"""
