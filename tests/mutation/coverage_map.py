"""Which test runs which line of the mutated packages, and how long each test takes: one run of the tests, as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest
from run import FORMULAS
from server import PYTEST, settle

AT_IMPORT = "(import)"


class Recorder:
    """Plugin: one coverage context per test."""

    def __init__(self, cov: coverage.Coverage) -> None:
        self.cov = cov
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None]:
        self.cov.switch_context(item.nodeid)
        start = time.process_time()
        yield
        self.seconds[item.nodeid] = round(time.process_time() - start, 4)
        self.cov.switch_context(AT_IMPORT)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def main() -> None:
    """coverage_map.py OUT TESTS..."""
    out, *tests = sys.argv[1:]
    settle()
    cov = coverage.Coverage(
        data_file=None,
        config_file=False,
        include=[f"*/strop/{name.replace('**/*.py', '*')}" for name in FORMULAS],
        messages=False,
    )
    cov.start()
    cov.switch_context(AT_IMPORT)
    recorder = Recorder(cov)
    pytest.main([*PYTEST, *tests], plugins=[recorder])
    cov.stop()
    data = cov.get_data()
    package = Path.cwd() / "strop"
    lines = {
        ".".join(Path(file).with_suffix("").relative_to(package).parts): {
            str(line): sorted(context for context in contexts if context)
            for line, contexts in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    facts = {"seconds": recorder.seconds, "failed": recorder.failed, "lines": lines}
    Path(out).write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
