"""Answers outside of training: a model's, a checkpoint's, a server's, and what they are worth.

answer_files.py     Answers in a file, with their tokens and, where asked for, what the model found likely in the
                    place of each
chat.py             Answers of a model to chats
checkpoints.py      Several models in one command
cost.py             What a training had spent by a step, from the records of its run
evaluate.py         Evaluation by itself
models.py           MODEL_OR_RUN
offline_answers.py  Answers that a file holds, as tokens
paired_test.py      Whether one model is better than another on the same prompts
pass_at_k.py        What k answers to a prompt reach together, and how sure that is
sets.py             `--data`
top_log_probs.py    What a model finds likely in the place of each token of answers that are there
well_known_sets.py  Well-known sets to evaluate on, by name
"""
