"""The hash chain: equal runs share it, and a difference is named where it begins."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from strop.run import STAGES, EventLog, FingerprintChain, RunError, digest
from strop.run.first_difference import Difference, common_steps, compare


def make_chain(
    path: Path, steps: int, *, changed: dict[tuple[int, str], str] | None = None
) -> FingerprintChain:
    chain = FingerprintChain(EventLog(path))
    for step in range(1, steps + 1):
        digests = {stage: (changed or {}).get((step, stage), f"{stage}-{step}") for stage in STAGES}
        chain.append(step, **digests)
    return chain


def test_chain_hash_is_sha256_over_previous_step_and_stages(tmp_path: Path) -> None:
    chain = FingerprintChain(EventLog(tmp_path / "a"))
    first = chain.append(1, weights="w1", loss="l1")
    assert first == hashlib.sha256(b"\n1\nloss=l1\nweights=w1\n").hexdigest()
    second = chain.append(2, loss="l2")
    assert second == hashlib.sha256(f"{first}\n2\nloss=l2\n".encode()).hexdigest()
    assert FingerprintChain(EventLog(tmp_path / "a")).head == second


def test_equal_runs_compare_as_none_over_the_common_steps(tmp_path: Path) -> None:
    a, b = make_chain(tmp_path / "a", 5).read(), make_chain(tmp_path / "b", 3).read()
    assert compare(a, b) is None
    assert common_steps(a, b) == [1, 2, 3]
    assert a[2].chain == b[2].chain


def test_first_differing_step_and_stage_are_named(tmp_path: Path) -> None:
    a = make_chain(tmp_path / "a", 5)
    b = make_chain(tmp_path / "b", 5, changed={(3, "weights"): "x", (3, "rewards"): "x", (4, "data"): "x"})
    assert compare(a.read(), b.read()) == Difference(step=3, stage="rewards", num_equal_steps=2)
    assert a.read()[4].chain != b.read()[4].chain, "a difference stays in every later chain hash"


def test_a_stage_that_one_run_lacks_is_a_difference(tmp_path: Path) -> None:
    a, b = FingerprintChain(EventLog(tmp_path / "a")), FingerprintChain(EventLog(tmp_path / "b"))
    a.append(1, loss="l")
    b.append(1, loss="l", weights="w")
    assert compare(a.read(), b.read()) == Difference(step=1, stage="weights", num_equal_steps=0)


def test_runs_without_a_common_step_are_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no step in common \(2 and 0 fingerprints\)"):
        compare(make_chain(tmp_path / "a", 2).read(), [])


def test_rollback_continues_to_the_same_chain(tmp_path: Path) -> None:
    whole = make_chain(tmp_path / "whole", 4).read()
    events = EventLog(tmp_path / "resumed")
    chain = FingerprintChain(events)
    for step in (1, 2, 3):
        chain.append(step, **{stage: f"{stage}-{step}" for stage in STAGES})
    events.rollback(1)
    chain.reload()
    assert chain.head == whole[0].chain
    for step in (2, 3, 4):
        chain.append(step, **{stage: f"{stage}-{step}" for stage in STAGES})
    assert chain.read() == whole


def test_changed_record_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    make_chain(path, 3)
    path.write_text(path.read_text().replace("loss-2", "loss-9"))
    with pytest.raises(RunError, match="fingerprint of step 2 does not follow from step 1"):
        FingerprintChain(EventLog(path))


def test_misuse_is_refused(tmp_path: Path) -> None:
    chain = make_chain(tmp_path / "a", 2)
    with pytest.raises(ValueError, match="unknown fingerprint stage 'reward'; did you mean 'rewards'"):
        chain.append(3, reward="x")
    with pytest.raises(ValueError, match="step 2 already has a fingerprint"):
        chain.append(2, loss="x")
    with pytest.raises(ValueError, match="has no stage"):
        chain.append(3)


def test_digest_tells_apart_what_differs_in_any_bit() -> None:
    zero = np.zeros(2, np.float32)
    parts: list[tuple[object, ...]] = [
        ("ab", "c"), ("a", "bc"), ("abc",), (b"abc",), (1, 2), ([1, 2],), (1.0,), (1,), (0.0,), (-0.0,),
        (float("nan"),),
        (zero,), (zero.astype(np.float64),), (zero.reshape(2, 1),), (-zero,), (np.zeros(0, np.float32),), (),
        (np.array(["ab"]),),
    ]  # fmt: skip
    digests = [digest(*part) for part in parts]  # type: ignore[arg-type]
    assert len(set(digests)) == len(parts)


def test_digest_sees_values_not_memory_layout() -> None:
    array = np.arange(12, dtype=np.int64).reshape(3, 4)
    assert digest(array.T) == digest(np.ascontiguousarray(array.T))
    assert digest(array[:, ::2]) == digest(array[:, ::2].copy())
    assert digest(array.T) != digest(array)
    header = b"array <i8 (3, 4)\n"
    assert digest(array) == hashlib.sha256(header + array.tobytes()).hexdigest()


def test_digest_refuses_what_has_no_bytes() -> None:
    with pytest.raises(TypeError, match="array of objects"):
        digest(np.array([object()]))
    with pytest.raises(TypeError, match="cannot hash a dict"):
        digest({})  # type: ignore[arg-type]
