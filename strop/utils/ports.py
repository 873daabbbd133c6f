"""Free ports, for programs that are told which one to listen on."""

from __future__ import annotations

import socket


def free_port(host: str = "") -> int:
    """A port on which nobody listened a moment ago.

    Args:
        host: an address of this machine; empty: any.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
