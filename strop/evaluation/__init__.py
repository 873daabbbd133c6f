"""Answers outside of training: a model's, a checkpoint's, a server's, and what they are worth.

alone.py             what answers without a run
evaluate.py          validation alone, for `strop eval` and from Python
eval_command.py      `strop eval`; eval_table.py: several models in one table and picture
compare_command.py   `strop compare`; paired.py: whether one model is better than another on the same prompts
models.py            MODEL_OR_RUN: from a run, a checkpoint or a model folder to a model and its settings
points.py            RUN@STEP, RUN@best and RUN@all: several models; spending.py: what their training had cost;
                     processes.py: how many processes it had
sets.py              --data: files, or sets by name
generate_command.py  `strop generate`; answering.py: answers to chats; answer_files.py: in a file, with tokens;
                     given_answers.py: answers that a file holds already;
                     likely_tokens.py: what a model finds likely in the place of each token
validation_metrics.py  val-core/ and val-aux/ numbers; votes.py: pass@k, best@k, worst@k and maj@k in closed form;
                     rates.py: pass@k and maj@k with intervals
reward_trial.py      the reward function tried before anything is loaded
intervals.py         how sure a rate is, in closed form
score_command.py     `strop score`; rescoring.py: saved answers scored once more
"""
