"""A reward function tested without a model: probes, and a certificate with a verdict.

certificate.py  Test of a reward without a model
probes.py       Probe answers for a reward
"""
