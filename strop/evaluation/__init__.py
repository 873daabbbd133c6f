"""Evaluation of models, checkpoints and servers outside of training.

answer_files.py     Files of answers, with their tokens and top-k log-probs
chat.py             Answers of a model to chats
checkpoints.py      Checkpoints of a run: RUN@STEP, RUN@best, RUN@all
cost.py             Tokens and device-hours of a training up to a step
evaluate.py         Standalone evaluation
models.py           MODEL_OR_RUN
offline_answers.py  Tokens of answers in a file
paired_test.py      Paired comparison of two models on the same prompts
pass_at_k.py        pass@k and maj@k with their intervals
sets.py             `--data`
top_log_probs.py    Top-k log-probs of a model at each token of given answers
well_known_sets.py  Well-known sets to evaluate on, by name
"""
