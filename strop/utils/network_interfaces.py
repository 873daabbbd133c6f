"""Network interfaces by address, and the libraries that listen on one."""

from __future__ import annotations

import ipaddress
import os


def keep_to_interface(address: str) -> None:
    """Have gloo and NCCL listen on the interface with this address alone, unless the user has named another one.

    By themselves they take what the machine's name resolves to, or any interface that is up, which may be a public one.
    NCCL's service for questions from outside (RAS) has no password and is left out, unless the user asks for it.
    """
    name = interface_of(address)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")


def interface_of(address: str) -> str:
    """The name of the interface that has an address of this machine; "" where none has."""
    import psutil  # here: groups of several processes need it, and come with the Ray runtime that brings it

    searched = ipaddress.ip_address(address.partition("%")[0])
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            try:
                bound = ipaddress.ip_address(entry.address.partition("%")[0])
            except ValueError:  # a hardware address
                continue
            # All of 127.0.0.0/8 is on the loopback interface, which shows one address of it.
            if bound == searched or (
                bound.is_loopback and searched.is_loopback and bound.version == searched.version
            ):
                return str(name)
    return ""
