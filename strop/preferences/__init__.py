"""Training on preferences: which of two answers is better, or whether an answer is good.

config.py   what is read and how it is trained: `prefer`
rows.py     rows as answers to the same prompt, tokenised
losses.py   DPO and its relatives, KTO, and the loss of a reward model, of a batch's sums
worker.py   sums of a batch, and an optimizer step that follows from what the losses say of them
trainer.py  the steps; the rest is that of `strop sft`
command.py  `strop prefer`; dpo_command.py and reward_model_command.py are `strop dpo` and `strop reward-model`
"""
