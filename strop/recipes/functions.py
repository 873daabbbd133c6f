"""All estimators and losses of this room: importing it registers them."""

from strop.recipes import (  # noqa: F401  (they register their functions)
    anchored,
    batch_whitened,
    covariance,
    geometric,
    greedy_baseline,
    group_baselines,
    imitation,
    plain,
    returns,
    sequence,
    smooth,
    token_baseline,
    trust_region,
    weighted,
)
