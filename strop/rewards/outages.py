"""Exceptions of a reward function that say that something scoring needs is not there, whatever the answer was.

Clients of HTTP are known by the names of their packages and exceptions, so that none of them is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from socket import gaierror

from strop.rewards.outcome import RewardUnavailable
from strop.sandbox.errors import SandboxFailed, SandboxUnavailable

_NOT_THE_ANSWER = (RewardUnavailable, SandboxUnavailable, SandboxFailed, ConnectionError)
"""Exceptions that say so themselves."""
_LOST: Mapping[str, frozenset[str]] = {
    package: frozenset(names.split())
    for package, names in {
        "aiohttp": "ClientConnectionError ClientPayloadError",
        "anthropic": "APIConnectionError",
        "http": "BadStatusLine IncompleteRead",
        "httpcore": "NetworkError TimeoutException RemoteProtocolError ProxyError",
        "httpcore2": "NetworkError TimeoutException RemoteProtocolError ProxyError",
        "httpx": "NetworkError TimeoutException RemoteProtocolError ProxyError",
        "httpx2": "NetworkError TimeoutException RemoteProtocolError ProxyError",
        "openai": "APIConnectionError",
        "requests": "ConnectionError Timeout ChunkedEncodingError",
        "urllib": "",
        "urllib3": "TimeoutError ProtocolError NewConnectionError",
    }.items()
}
"""Clients, whose exceptions stand for those that they caught, and those of them for a connection that was not made, was
cut, or brought nothing in time."""
_TIMING_OUT = _LOST.keys() | {"socket", "ssl"}
"""Modules whose own TimeoutError is about a connection."""
_AWAITED = frozenset({"asyncio.streams", "asyncio.sslproto"})
"""Modules beside the clients in which a coroutine waits for a connection."""
_COME_AGAIN = frozenset({408, 409, 425, 429})
"""Refusals of HTTP that are about the moment, beside all from 500 on."""
_MAX_CAUSES = 10
"""Exceptions behind an exception that are looked at."""


def is_outage(error: BaseException) -> bool:
    """True where something that scoring needs is not there: the error says so itself, or was raised because of one that
    does, as clients of HTTP do (`urllib`, `requests`, `httpx`, `openai`). What the function itself raises while it
    handles such an error may be about the answer."""
    is_of_client = False
    with contextlib.suppress(BaseException):  # attributes of an exception are the user's code as well
        for _ in range(_MAX_CAUSES):
            if isinstance(error, _NOT_THE_ANSWER) or _is_lost(error) or _is_refused_for_now(error):
                return True
            if isinstance(error, TimeoutError) and _waited_for_client(error.__cause__):
                return True
            if is_of_client and isinstance(error, (gaierror, TimeoutError)):
                return True
            reason = getattr(error, "reason", None)  # of urllib.error.URLError
            is_of_client = _package(type(error).__module__) in _LOST
            may_stand_for_context = is_of_client or isinstance(error, OSError)
            cause: BaseException | None = error.__cause__
            if isinstance(reason, BaseException):
                is_of_client, cause = True, reason
            elif may_stand_for_context and not error.__suppress_context__:
                cause = error.__context__
            if cause is None:
                return False
            error = cause
    return False


def _package(module: object) -> str:
    return str(module).partition(".")[0]


def _is_lost(error: BaseException) -> bool:
    """A client, or the socket below it, says of a connection that it is none."""
    if any(base.__name__ in _LOST.get(_package(base.__module__), ()) for base in type(error).__mro__):
        return True
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    raised_in = "" if frame is None else _package(frame.tb_frame.f_globals.get("__name__"))
    return isinstance(error, TimeoutError) and raised_in in _TIMING_OUT


def _waited_for_client(cancelled: BaseException | None) -> bool:
    """A limit of the function's own (`asyncio.timeout`, `asyncio.wait_for`) cancelled what waited for a connection."""
    if type(cancelled).__name__ != "CancelledError" or cancelled is None:
        return False
    frame = cancelled.__traceback__
    while frame is not None:
        module = str(frame.tb_frame.f_globals.get("__name__"))
        if module in _AWAITED or _package(module) in _LOST:
            return True
        frame = frame.tb_next
    return False


def _is_refused_for_now(error: BaseException) -> bool:
    """A server has answered with a status that is about itself: a rate limit, an overload, a failure."""
    response = getattr(error, "response", None)
    for holder, name in ((error, "status_code"), (error, "status"), (response, "status_code")):
        status = getattr(holder, name, None)
        if isinstance(status, int) and (status in _COME_AGAIN or 500 <= status < 600):
            return True
    return False
