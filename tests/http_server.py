"""HTTP servers of tests, on loopback."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class LocalServer(ThreadingHTTPServer):
    """A server whose clients may leave in the middle of an answer.

    Its threads outlive the test that started it: without this, one that finds its client gone prints a traceback to the
    standard error of a later test.
    """

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
