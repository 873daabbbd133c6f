"""Quiet libraries, and the log of warnings on the terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterator

from strop.utils.terminal import say

_FX_LOGGER = "torch.fx._symbolic_trace"
"""torch 2.13 logs a deprecation of its own `is_fx_tracing` there, which transformers calls; remove this when
transformers does not."""
_NESTED_WARNING = "The PyTorch API of nested tensors is in prototype stage"


@contextlib.contextmanager
def terminal_log(*, debug: bool) -> Iterator[None]:
    """While it lasts, warnings of strop and of libraries are shown, each kind once; all of them with `debug`."""
    handler = _TerminalHandler(debug=debug)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        with _without_notices():
            yield
    finally:
        root.removeHandler(handler)


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """While it lasts, two warnings of torch that say nothing about a run are dropped."""
    fx = logging.getLogger(_FX_LOGGER)
    fx.addFilter(_is_no_fx_notice)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_NESTED_WARNING)
            yield
    finally:
        fx.removeFilter(_is_no_fx_notice)


SPIN_COUNT = "30000"
"""Number of times a waiting OpenMP thread looks before it sleeps: about 0.1 ms, longer than the pause between two
operations. The default of libgomp is ten times that or more: with two busy programs beside it, a quickstart took ten
times as long, because spinning threads keep the core from the thread that they wait for."""
BLOCK_TIME_MS = "1"
"""The same for builds of torch with Intel's OpenMP: milliseconds that a thread waits awake, of 200 by default."""


def share_cores() -> None:
    """Let threads that wait sleep soon, unless the user says otherwise; call it before torch is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        os.environ.setdefault("KMP_BLOCKTIME", BLOCK_TIME_MS)


def quiet_models() -> None:
    """No progress bars for reading and writing model files. Imports transformers: call it when settings are read."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types here


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """While it lasts, no progress bars for model files and rows, and none of the warnings that `terminal_log` drops."""
    import datasets
    from transformers.utils import logging as transformers_logging

    shows_models, shows_rows = (
        transformers_logging.is_progress_bar_enabled(),
        datasets.is_progress_bar_enabled(),
    )
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types here
    datasets.disable_progress_bars()
    try:
        with _without_notices():
            yield
    finally:
        if shows_models:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if shows_rows:
            datasets.enable_progress_bars()


class _TerminalHandler(logging.Handler):
    """A record is one line on standard error, without its traceback unless `debug`."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__(level=logging.DEBUG if debug else logging.WARNING)
        self._debug = debug
        self._seen: set[tuple[str, str, str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Show the record, if none of its kind was shown before."""
        line = record.getMessage()
        if getattr(record, "is_as_it_is", False):
            say(line)
            return
        if self._debug:
            say(self.format(record))
            return
        cause = ""
        if record.exc_info and record.exc_info[1] is not None:
            cause = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        kind = (
            record.name,
            str(record.msg),
            re.sub(r"\d+", "0", cause),
        )  # a row's number makes no other kind
        if kind not in self._seen:
            self._seen.add(kind)
            say(f"warning: {line}: {cause} (others like it are not shown; --debug shows all)" if cause else
                f"warning: {line}")  # fmt: skip


def _is_no_fx_notice(record: logging.LogRecord) -> bool:
    return "is_fx_tracing" not in record.getMessage()
