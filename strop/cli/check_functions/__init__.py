"""Does a loss or an estimator keep the rules that training relies on? The same questions for ours and a user's own.

policy_losses.py   check_policy_loss: the rules in loss_rules.py, on the batches of loss_probe.py
estimators.py      check_adv_estimator: the rules in estimator_rules.py, on the batches of estimator_batches.py
named.py           the functions that a command line names
findings.py        what they found (torch-free)
"""
