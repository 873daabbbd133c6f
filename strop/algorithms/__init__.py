"""Algorithms as pure functions of tensors: advantages, losses, KL, corrections, metrics.

aggregation.py                Aggregation of per-token terms into one loss
batch_metrics.py              Metrics of the rows of a step
best_of_k.py                  Quality of a set of answers: pass@k, best@k, maj@k
builtin_specs.py              Columns and settings that the built-in advantage estimators and policy losses take, by
                              name (torch-free)
config.py                     Settings of the algorithm
distillation_config.py        Settings of distillation
dynamic_sampling_config.py    Settings of dynamic sampling
implicit_reward.py            The implicit process reward model
intervals.py                  Confidence intervals of success probabilities and mean rewards
kl.py                         Per-token estimators of the KL divergence from the policy to a reference model
kl_controller.py              The coefficient of the KL penalty in the reward
masked_ops.py                 Sums, means and whitening over the valid positions of a tensor
names.py                      Names of loss reductions and KL estimators in the configuration
preference_loss_config.py     The numbers of losses of preferences, as a user sets them
registry.py                   Names that arrive from a config, the functions they stand for, and what each function
                              declares
resampling.py                 Resampling by scores (PF-PPO)
results.py                    Results of users' functions, described for errors
reward_kl.py                  The KL penalty in the reward, taken off each token before advantages are computed
reward_kl_config.py           Settings of the KL penalty in the reward
rollout_correction.py         Rollout correction
rollout_correction_config.py  Settings of rollout correction
sample_selection_config.py    Settings of the selection of samples to train on
sequence_credit.py            Credit of episodes that consist of several training sequences
specs.py                      Specs of advantage estimators and policy losses by name, and checks of their settings
                              (torch-free)
verl_aggregation.py           Reduction for losses that reduce by themselves, as in verl
verl_config.py                Settings and calls in verl's convention
advantages/                   Advantage estimators
group_functions/              Functions of a user's own on the samples of a prompt
losses/                       Policy losses as per-token terms

Rules that functions keep, ours and a user's own, are checked by `strop.cli`.
Nothing is imported here, so that the torch-free modules stay free of torch.
"""
