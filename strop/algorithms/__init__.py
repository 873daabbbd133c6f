"""Pure functions of tensors: what an algorithm computes, and nothing about where or when.

aggregation.py                How per-token terms become one loss
batch_metrics.py              What is measured on the rows of a step
best_of_k.py                  How good a set of answers is
builtin_specs.py              Columns and settings that the built-in advantage estimators and policy losses take, by
                              name (torch-free)
config.py                     The numbers of the algorithm, as a user sets them
distillation_config.py        What a user sets about a teacher that the policy learns from
dynamic_sampling_config.py    What a user sets about dynamic sampling
implicit_reward.py            The implicit process reward model
intervals.py                  How sure a rate or a mean is
kl.py                         Per-token estimators of the KL divergence from the policy to a reference model
kl_controller.py              The coefficient of the KL penalty in the reward
masked_ops.py                 Sums, means and whitening over the valid positions of a tensor
names.py                      Words of the configuration for ways of reducing a loss and of estimating a KL
preference_loss_config.py     The numbers of losses of preferences, as a user sets them
registry.py                   Names that arrive from a config, the functions they stand for, and what each function
                              declares
resampling.py                 PF-PPO
results.py                    Results of users' functions, described for errors
reward_kl.py                  The KL penalty in the reward, taken off each token before advantages are computed
                              (kl_controller.py
reward_kl_config.py           Settings of the KL penalty in the reward
rollout_correction.py         Rollout correction
rollout_correction_config.py  What a user sets about rollout correction
sample_selection_config.py    What a user sets about the samples that are trained on
sequence_credit.py            Credit of episodes that consist of several training sequences
specs.py                      Specs of advantage estimators and policy losses by name, and checks of their settings
                              (torch-free)
verl_aggregation.py           The one number of losses that reduce by themselves, as in verl
verl_config.py                Settings and calls in verl's convention
advantages/                   Advantage estimators
group_functions/              Functions of a user's own on the samples of a prompt
losses/                       Policy losses as per-token terms

Rules that functions keep, ours and a user's own, are checked by `strop.cli`.
Nothing is imported here, so that the torch-free modules stay free of torch.
"""
