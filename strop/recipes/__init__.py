"""Recipes beyond the core's: advantage estimators and policy losses of further papers.

declarations.py     what each asks for, and what may be set for it; checks.py: what does not go with it (torch-free)
functions.py        importing it registers all of them

batch_whitened.py   reinforce_plus_plus_baseline, gdpo: compared (gdpo: the parts of a reward one by one), then whitened
group_baselines.py  rloo, grpo_passk, opo, gpg, maxrl: samples of a prompt compared
returns.py          reinforce_plus_plus: rewards-to-go, token by token
anchored.py         gigpo: episodes compared, and answers given in the same state
greedy_baseline.py  remax: a greedy answer as the baseline
imitation.py        raft: every sample that is kept counts the same
token_baseline.py   optimal_token_baseline, tir_optimal_token_baseline: tokens at the same place compared

plain.py            gpg (reinforce): no clipping
sequence.py         gspo (gspo_token): one ratio per response
weighted.py         cispo: log-probs under a weight without gradient
geometric.py        gmpo (geo_mean): one ratio per response
trust_region.py     dppo_tv, dppo_kl: tokens that moved too far are left out
smooth.py           sapo, dro: no clipping
covariance.py       clip_cov, kl_cov: tokens chosen by statistics of the whole optimizer batch

masked.py           sums, means and whitening under a mask

choosing.py         samples chosen for training; resampling.py: PF-PPO, drawn by their scores; choice_settings.py
answers.py          columns that gigpo, gdpo and remax take; anchors.py: answers that were given in the same state
measures.py         what is measured on the rows of a step
reward_kl.py        a KL penalty on each token, in the reward; kl_controller.py: its coefficient; reward_kl_settings.py
correction.py       tis, icepop, mis: weights and rejections where rollout and trainer disagree; correction_settings.py;
                    correction_columns.py: of all rows of a step

The rules of strop.algorithms.advantages and strop.algorithms.losses hold here too.
"""
