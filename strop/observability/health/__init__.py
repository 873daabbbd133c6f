"""Rules that turn the metrics of a run into named diagnoses with advice, during and after it.

rules.py        the rules and who applies them; side_rules.py: those on critic and process reward model
history.py      what the metrics of a run were
staleness_metrics.py    how old samples are, against the policy that is trained
"""

from __future__ import annotations

from strop.observability.health.history import History
from strop.observability.health.rules import RULES, Diagnosis, HealthMonitor

__all__ = ["RULES", "Diagnosis", "HealthMonitor", "History"]
