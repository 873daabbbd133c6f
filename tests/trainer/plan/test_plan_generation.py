"""Seconds of generation over several ranks of a processor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from plan_configs import config_of

from strop.trainer.plan.devices import device_named
from strop.trainer.plan.generation_time import decode_ratios, generation_seconds
from strop.trainer.plan.plan import lengths_of
from strop.trainer.plan.roles import planned_roles


@pytest.mark.parametrize(
    ("product_flops", "weight_bandwidth"), [(1.0, 1e30), (1e30, 1.0)], ids=["products", "memory"]
)
def test_ranks_of_an_engine_share_the_time_of_one(
    tmp_path: Path, product_flops: float, weight_bandwidth: float
) -> None:
    # Where products, or weights and keys that are read, are all that counts, two ranks take half of one's time, however
    # long the decode steps of the trial were; what is packed takes its own.
    config = config_of(tmp_path)
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
    cpu = replace(
        device_named("h100"), product_flops=product_flops, attention_flops=1e30, bandwidth=1e30,
        weight_bandwidth=weight_bandwidth, few_rows_bandwidth=1e30, call_s=0.0, threads=1,
    )  # fmt: skip
    ratios = decode_ratios(actor, cpu, running=16)
    packed = ratios.packed_number * actor.sizes.decoded
    one, two, four = (
        generation_seconds(config, actor, cpu, engines=1, ranks=ranks, samples=16) - packed
        for ranks in (1, 2, 4)
    )
    assert one == pytest.approx(2 * two, rel=1e-6)
    assert one == pytest.approx(4 * four, rel=1e-6)
