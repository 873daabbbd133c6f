"""Settings of calls to a service over HTTP, and its address; what makes the calls is http_client.py, whose event loops
are not loaded for settings that are only read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from strop.utils.field_types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """Settings of calls to a service: its key, rates and retries."""

    api_key_env: str = ""
    """Environment variable with the key of the service, sent as a bearer token. Empty: no key."""
    retries: Annotated[NonNegativeInt, "0 is none"] = 4
    """Repeats of a request that met a rate limit (429), a broken server (408, 5xx), a cut connection, an answer that is
    no JSON, or no answer in time. Other refusals are final."""
    backoff_s: NonNegativeFloat = 1.0
    """Wait before the first repeat, in seconds; doubled before each further one, up to a minute. Half of it is left to
    chance, and a server's Retry-After (up to a minute) is respected."""
    max_concurrent: PositiveInt = 16
    """Requests under way at the same time, of the whole run: each rollout worker has an equal share of them."""
    requests_per_s: PositiveFloat | None = None
    """Requests that may start per second, of the whole run; null: no limit. Each rollout worker has an equal share; a
    second's worth of it, at least one request, may start at once."""


def check_address(setting: str, address: str) -> None:
    """Refuse what is no address of a service.

    Raises:
        ValueError: the sentence names the setting.
    """
    parts = urlsplit(address)
    try:
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number up to 65535
        is_address = False
    if not is_address:
        raise ValueError(f"{setting} is {address!r}; give an address such as http://127.0.0.1:8000/v1")
    if parts.username or parts.password:
        raise ValueError(
            f"{setting} holds a password, which would be written to the run folder: use api_key_env"
        )
