"""One POST of JSON with one deadline for all of it: connecting, sending, waiting and reading.

Redirects are not followed (they would carry the key elsewhere) and no proxy of the environment is used: the address is
the one that was configured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

MAX_ANSWER_BYTES = 16 << 20
_READ_BYTES = 1 << 16
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Connection": "close"}


class AnswerTooLargeError(OSError):
    """More came back than MAX_ANSWER_BYTES."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The response of a server."""

    status: int
    body: bytes
    retry_after_s: float | None = None
    """Seconds that the server asks to wait before the next request."""


async def post(url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float) -> Answer:
    """Send and wait; whoever cancels it closes the connection.

    Raises:
        OSError: there is no whole answer; a TimeoutError where its time is up.
    """
    import aiohttp  # here: every reward worker imports this module, and few processes speak to a service

    content = bytearray()
    try:
        async with (
            asyncio.timeout(timeout_s),
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
            ) as session,
            session.post(url, data=body, headers={**_HEADERS, **headers}, allow_redirects=False) as response,
        ):
            async for data in response.content.iter_chunked(_READ_BYTES):
                content += data
                if len(content) > MAX_ANSWER_BYTES:
                    raise AnswerTooLargeError(f"more than {MAX_ANSWER_BYTES >> 20} MiB came back")
            return Answer(
                status=response.status,
                body=bytes(content),
                retry_after_s=_seconds(response.headers.get("Retry-After")),
            )
    except aiohttp.ClientConnectorError as error:
        raise error.os_error from error
    except aiohttp.ClientPayloadError as error:
        raise OSError(f"the answer was cut after {len(content)} bytes ({error})") from error
    except aiohttp.ClientError as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _seconds(text: str | None) -> float | None:
    """Retry-After as seconds; its other form, a date, is not used by rate limits."""
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
