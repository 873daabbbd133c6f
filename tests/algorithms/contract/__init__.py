"""Contract tests of losses and estimators: the rules that every registered one keeps.

policy_losses.py   check_policy_loss: the rules in loss_rules.py, on the batches of loss_probe.py
estimators.py      check_adv_estimator: the rules in estimator_rules.py, on the batches of estimator_batches.py; TRAITS
findings.py        the breach of a rule

`strop check` asks a few of these of a user's own function (strop/cli/check_functions).
"""
