"""`strop check loss` and `strop check estimator`: a short live check of a function; the whole contract of those that
come with strop is in tests/algorithms/contract.

policy_losses.py   check_policy_loss
estimators.py      check_adv_estimator
named.py           the functions that a command line names
findings.py        the breach of a rule (torch-free)
"""
