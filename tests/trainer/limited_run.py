"""A run in a process of its own whose address space is limited while it trains: `limited_run.py FILE`.

The file is JSON: folder, settings, and more_bytes that a rehearsal or an update may take (0: any). It prints the most
that one of them has taken, and what was said, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strop.trainer.learning import LearnerResult
from strop.trainer.loading import load
from strop.trainer.loop import Trainer
from strop.trainer.start import start_run


def address_space(name: str) -> int:
    """VmSize or VmPeak of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class LimitedTrainer(Trainer):
    """Limits rehearsal and updates; generation takes its cache without a limit."""

    more_bytes = 0
    taken = 0

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        start = address_space("VmSize")
        if self.more_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (start + self.more_bytes, resource.RLIM_INFINITY))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.taken = max(self.taken, address_space("VmPeak") - start)

    def _fit_memory(self) -> None:
        with self.limited():
            super()._fit_memory()
        learn = self.learner.learn

        def limited_learn(*args: Any) -> LearnerResult:
            with self.limited():
                return learn(*args)

        self.learner.learn = limited_learn  # type: ignore[method-assign]


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    config = load(overrides=asked["settings"])
    said: list[str] = []
    with start_run(Path(asked["folder"]), config, command=["strop", "train"]).run as run:
        trainer = LimitedTrainer(config, run, checkpoint=None, say=said.append)
        trainer.more_bytes = asked["more_bytes"]
        trainer.fit()
    print(json.dumps({"taken": trainer.taken, "said": said}))


if __name__ == "__main__":
    main()
