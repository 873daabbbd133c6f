"""Can this run learn? A few dozen samples of its own first prompts, before anything is trained.

facts.py   Facts about chat template, tokenizer and model, from the first prompts of a run
of_run.py  A run before its first step
rules.py   Can this run learn? Checks on a few dozen samples of its own first prompts, before anything is trained
tokens.py  Do template, tokenizer and model fit together? Checks on the tokens of prompts, before anything is
           generated
trial.py   A few dozen samples through the real path of a run, before it starts

Nothing is imported here.
"""
