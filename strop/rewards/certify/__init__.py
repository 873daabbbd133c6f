"""A reward function tried without a model: probes, and a certificate with a verdict.

certificate.py  A reward tried without a model
probes.py       Answers that a reward is tried with
"""
