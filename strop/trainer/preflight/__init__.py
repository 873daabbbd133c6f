"""Can this run learn? A few dozen samples of its own first prompts, before anything is trained.

of_run.py     before the first step of a run, which may be refused
trial.py      the samples are played, scored and shown
facts.py      what the prompts show about chat template, tokenizer and model; tokens.py: what is wrong with that
rules.py      what the samples say; verdict.py: a thing that was looked at

Nothing is imported here.
"""
