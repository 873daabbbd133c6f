"""Training on preferences: which of two answers is better, or whether an answer is good.

preference_config.py   what is read and how it is trained: `prefer`
preference_rows.py     rows as answers to the same prompt, tokenised
preference.py   DPO and its relatives, KTO, and the loss of a reward model, of a batch's sums
preference.py   sums of a batch, and an optimizer step that follows from what the losses say of them
trainer.py  the steps; the rest is that of `strop sft`
prefer.py  `strop prefer`; dpo.py and reward_model.py are `strop dpo` and `strop reward-model`
"""
