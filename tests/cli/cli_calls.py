"""The command line as a function, and what the tests of commands share."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from strop.cli.main import main


@dataclass(frozen=True)
class Result:
    """What a command line left behind."""

    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        """The last line of standard output, which is one JSON object."""
        record = json.loads(self.out.splitlines()[-1])
        assert isinstance(record, dict)
        return record

    @property
    def sentence(self) -> str:
        """The last line of standard error: the error."""
        assert self.code == 2, (self.code, self.err)
        assert "Traceback" not in self.err, self.err
        return self.err.splitlines()[-1]


@dataclass(frozen=True)
class Project:
    """Where the shared files are."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def data(self, name: str) -> Path:
        return self.folder / "data" / f"{name}.parquet"


def cli(*words: object) -> Result:
    """Run `strop WORDS` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return Result(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def interrupted_after(*, step: int) -> Iterator[None]:
    """Ctrl-C arrives when the step after `step` begins."""
    from strop.trainer.loop import Trainer
    from strop.trainer.records import StepRecord
    from strop.trainer.timing import Stages

    original = Trainer.step

    def step_or_stop(self: Trainer, number: int, stages: Stages) -> StepRecord:
        if number > step:
            raise KeyboardInterrupt
        return original(self, number, stages)

    with patch.object(Trainer, "step", step_or_stop):
        yield
