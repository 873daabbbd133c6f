"""One running sandbox for all tests of this folder, and what must hold after each of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from sandbox_cases import SECRET, Runner, launchers

from strop.sandbox import LocalSandbox, SandboxConfig


@pytest.fixture(scope="session")
def with_groups() -> Iterator[LocalSandbox]:
    os.environ["STROP_TEST_SECRET"] = SECRET  # before any launcher starts
    sandbox = LocalSandbox(SandboxConfig(max_concurrent=4, num_warm=2))
    sandbox.start()
    yield sandbox
    sandbox.close()
    del os.environ["STROP_TEST_SECRET"]


@pytest.fixture(scope="session")
def without_groups() -> Iterator[LocalSandbox]:
    sandbox = LocalSandbox(SandboxConfig(max_concurrent=2, num_warm=1), uses_groups=False)
    sandbox.start()
    yield sandbox
    sandbox.close()


@pytest.fixture
def run(with_groups: LocalSandbox) -> Runner:
    return Runner(with_groups)


@pytest.fixture(params=["control groups", "measured"])
def run_both(request: pytest.FixtureRequest) -> Runner:
    """Once with control groups where the machine has them, once with the launcher's own measurements."""
    name = "with_groups" if request.param == "control groups" else "without_groups"
    return Runner(request.getfixturevalue(name))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    until = time.monotonic() + 5
    for launcher in launchers():
        while launcher.is_running() and (left := launcher.children(recursive=True)):
            assert time.monotonic() < until, f"still there: {left}"
            time.sleep(0.02)
