"""Answers outside of training: a model's, a checkpoint's, a server's, and what they are worth.

standalone.py             what answers without a run
evaluate.py          validation alone, for `strop eval` and from Python
eval.py      `strop eval`; eval_table.py: several models in one table and picture
compare.py   `strop compare`; paired_test.py: whether one model is better than another on the same prompts
models.py            MODEL_OR_RUN: from a run, a checkpoint or a model folder to a model and its settings
checkpoints.py            RUN@STEP, RUN@best and RUN@all: several models; cost.py: what their training had cost;
                     processes.py: how many processes it had
sets.py              --data: files, or sets by name
generate.py  `strop generate`; chat.py: answers to chats; answer_files.py: in a file, with tokens;
                     offline_answers.py: answers that a file holds already;
                     top_log_probs.py: what a model finds likely in the place of each token
validation_metrics.py  val-core/ and val-aux/ numbers; best_of_k.py: pass@k, best@k, worst@k and maj@k in closed form;
                     pass_at_k.py: pass@k and maj@k with intervals
reward_trial.py      the reward function tried before anything is loaded
intervals.py         how sure a rate is, in closed form
score.py     `strop score`; rescoring.py: saved answers scored once more
"""
