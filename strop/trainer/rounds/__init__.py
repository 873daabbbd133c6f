"""Steps that choose what they play: rounds until enough groups can teach, and long prompts first.

collector.py   dynamic sampling (algorithm.filter_groups); group_filter.py: which groups can
               teach; dynamic_sampling_config.py: what a user sets; check.py: settings that do not go with it
lengths.py     which prompts a step begins with (rollout.longest_first)
"""
