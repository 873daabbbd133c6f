"""Rules that turn the metrics of a run into named diagnoses with advice, during and after it.

history.py     The metrics of a run so far, as the rules look at them
rules.py       From the metrics of a run to named diagnoses
side_rules.py  Rules on the models that learn beside the policy
"""

from __future__ import annotations

from strop.observability.health.history import History
from strop.observability.health.rules import RULES, Diagnosis, HealthMonitor

__all__ = ["RULES", "Diagnosis", "HealthMonitor", "History"]
